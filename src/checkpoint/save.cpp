#include "checkpoint/save.hpp"

#include "checkpoint/files/checked_files.hpp"
#include "comm/on_ranks.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::checkpoint {

using comm::run_on_all;
using comm::run_on_root;

Save::Save(CheckpointContents contents, int index, SaveTarget target, LastSave& last)
    : contents_(std::move(contents)), index_(index), target_(std::move(target)), last_(last), state_(contents_) {}

void Save::prepare(const Communicator& communicator) {
  std::vector<Json> outlines;
  for (const auto& rank : run_on_all(communicator, [&] {
         const auto mine = list_user_files(contents_.directory);
         return Json::array({mine.names, mine.metadata, state_.outline()});
       })) {
    files_.push_back({.names = rank[0], .metadata = rank[1]});
    outlines.push_back(rank[2]);
  }
  state_.prepare(communicator, outlines, last_.layout);
  copy_files(communicator);
}

void Save::open(const Communicator& communicator) {
  if (std::exchange(opened_, true)) return;
  run_on_all(communicator, [&] {
    if (!target_.is_leader) return;
    target_.tier->begin(index_);
    target_.tier->create(index_, state_name, state_.file_bytes());
  });
}

void Save::copy_files(const Communicator& communicator) {
  if (std::ranges::all_of(files_, [](const UserFiles& files) { return files.names.empty(); })) return;
  open(communicator);
  const auto owners = owners_of(files_);
  const int rank = communicator.rank();
  for (auto& copied_files : run_on_all(communicator, [&] {
         auto copied = Json::array();
         for (const auto& name : files_[static_cast<std::size_t>(rank)].names)
           copied.push_back(owners.at(name) == rank ? copy_file(*contents_.directory, name, *target_.tier, index_)
                                                    : checksum_file(*contents_.directory, name));
         return copied;
       }))
    copied_files_.push_back(std::move(copied_files));
}

void Save::write(const Communicator& communicator) {
  open(communicator);
  state_.write(communicator, last_.writer,
               [&](storage::Alignment alignment) { return target_.tier->open(index_, state_name, alignment); });
}

void Save::complete(const Communicator& communicator) {
  if (!target_.is_per_node)
    return run_on_root(communicator, [&] {
      write_manifest(*target_.tier, manifest_ = make_manifest());
      target_.tier->publish(index_);
    });
  // All nodes store the manifest of rank 0, since it contains the time.
  manifest_ = from_text(run_on_root(communicator, [&] { return to_text(make_manifest()); }), "the manifest");
  run_on_all(communicator, [&] {
    if (target_.is_leader) {
      write_manifest(*target_.tier, manifest_);
      target_.tier->publish(index_);
    }
  });
}

Manifest Save::make_manifest() const {
  Manifest manifest{.index = index_,
                    .time = time_now(),
                    .world_size = static_cast<int>(files_.size()),
                    .position_json = contents_.position_json,
                    .metrics = contents_.metrics,
                    .metadata = merge_metadata(contents_.metadata, files_),
                    .files = merge_files(copied_files_)};
  state_.add_to(manifest);
  return manifest;
}

std::vector<std::string> Save::files_of(int rank) const {
  std::vector<std::string> names;
  for (const auto& [name, owner] : owners_of(files_))
    if (owner == rank) names.push_back(name);
  return names;
}

}  // namespace muster::detail::checkpoint
