// muster bench checkpoint: saves a state until it is durable, and restores it; compared with the disk alone and torch.
#include "base/temporary.hpp"
#include "base/text.hpp"
#include "bench.hpp"
#include "peers.hpp"
#include "programs.hpp"
#include "rounds.hpp"
#include "stall.hpp"
#include "training.hpp"

#include <fcntl.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <unistd.h>
#include <muster/checkpoint.hpp>
#include <muster/error.hpp>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>

namespace muster::bench {
namespace {

constexpr const char* save_case = "save";
constexpr const char* restore_case = "restore";
constexpr const char* stall_case = "async stall";
constexpr const char* fused_stall_case = "async stall fused";

/// The state that is saved and restored: parameters of a model, the same on every rank.
constexpr int tensors = 160;
constexpr std::int64_t megabytes = 420;

struct Model : torch::nn::Module {
  explicit Model(std::uint64_t seed) {
    torch::manual_seed(seed);
    for (int i = 0; i < tensors; ++i)
      register_parameter(detail::str("t", i), torch::rand({megabytes * 1'000'000 / 4 / tensors}));
  }
};

/// Reports the model and waits until the checkpoint is durable. Collective.
Checkpoint save(Session& session, const std::shared_ptr<Model>& model) {
  session.report({}, session.state({{"model", model}}));
  return *session.get_checkpoint();
}

/// Removes a folder, on rank 0, and waits until the system has written everything to the disk. Collective.
void clear_away(const Communicator& communicator, const std::filesystem::path& folder) {
  communicator.barrier();
  if (communicator.rank() == 0) {
    std::filesystem::remove_all(folder);
    ::sync();
  }
  communicator.barrier();
}

/// The lower bound for a save: writes a rank's part of the bytes from aligned memory into a new file with preallocated
/// space, bypassing the page cache if the file system can.
class RawFile {
 public:
  RawFile(std::filesystem::path path, std::size_t bytes)
      : path_(std::move(path)),
        bytes_((bytes + block - 1) / block * block),
        buffer_(static_cast<char*>(std::aligned_alloc(block, chunk)), std::free) {
    for (std::size_t i = 0; i < chunk; ++i) buffer_.get()[i] = static_cast<char>(i * 0x9E3779B97F4A7C15 >> 56);
  }

  void write() const {
    const int file = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    check(file >= 0);
    check(::fallocate(file, 0, 0, static_cast<off_t>(bytes_)) == 0 || errno == EOPNOTSUPP);
    // If the file system does not support O_DIRECT, the writes go through the page cache.
    ::fcntl(file, F_SETFL, ::fcntl(file, F_GETFL) | O_DIRECT);
    for (std::size_t at = 0; at < bytes_; at += chunk) {
      const auto size = std::min(chunk, bytes_ - at);
      check(::pwrite(file, buffer_.get(), size, static_cast<off_t>(at)) == static_cast<ssize_t>(size));
    }
    check(::fdatasync(file) == 0);
    check(::close(file) == 0);
  }
  void remove() const { std::filesystem::remove(path_); }

 private:
  static constexpr std::size_t chunk = 16 << 20, block = 4096;
  void check(bool well) const {
    if (!well)
      throw Error(ExitCode::retry, "writing " + path_.string(), std::strerror(errno), "Name another with TMPDIR");
  }

  std::filesystem::path path_;
  std::size_t bytes_;
  std::unique_ptr<char, void (*)(void*)> buffer_;
};

std::vector<Candidate> saving(Session& session) {
  const auto& communicator = session.communicator();
  const auto model = std::make_shared<Model>(1);
  const auto saved = std::make_shared<std::filesystem::path>(save(session, model).path());
  const auto raw = std::make_shared<RawFile>(saved->parent_path() / detail::str("raw.", communicator.rank()),
                                             static_cast<std::size_t>(megabytes * 1'000'000 / communicator.size()));
  const auto clear = [=] { clear_away(communicator, *saved); };
  const auto muster = [&](const char* name) {
    return Candidate{.name = name, .run = [=, &session] { *saved = save(session, model).path(); }, .after = clear};
  };
  clear();
  return {muster(ours),
          {.name = "raw", .run = [=] { raw->write(); }, .after = [=] { raw->remove(), clear(); }},
          muster(twin)};
}

std::vector<Candidate> restoring(Session& session) {
  const auto& communicator = session.communicator();
  const auto model = std::make_shared<Model>(1), target = std::make_shared<Model>(2);
  const auto checkpoint = save(session, model);
  const auto check = [=] {
    const auto mine = target->parameters(), saved = model->parameters();
    bool same = true;
    for (std::size_t i = 0; i < mine.size(); ++i) {
      same = same && mine[i].equal(saved[i]);
      mine[i].detach().zero_();
    }
    if (communicator.all_reduce(std::int64_t{same}) != communicator.size())
      throw Error(ExitCode::user_error, "checking what was restored", "it is not what was saved",
                  "Do not use the figures of this run");
  };
  const auto muster = [&](const char* name) {
    return Candidate{.name = name, .run = [=] { checkpoint.load("model", target); }, .after = check};
  };
  const auto copy = [=] {
    const auto to = target->parameters(), from = model->parameters();
    for (std::size_t i = 0; i < to.size(); ++i)
      std::memcpy(to[i].mutable_data_ptr(), from[i].const_data_ptr(), from[i].nbytes());
  };
  return {muster(ours), {.name = "memcpy", .run = copy, .after = check}, muster(twin)};
}

Timings measure_candidates(Session& session, std::vector<Candidate> candidates, const Measurement& measurement) {
  for (const auto& candidate : candidates) candidate.run(), candidate.after();  // warm-up
  return measure(session.communicator(), candidates, measurement);
}

Row measure_checkpoint(Launch& launch, const std::string& name, const Options&, const Measurement& measurement) {
  if (name != save_case && name != restore_case)
    return make_row(name, measure_stall(launch, name == fused_stall_case, measurement));
  Row row;
  in_session(launch, name, [&](Session& session) {
    row = make_row(name,
                   measure_candidates(session, name == save_case ? saving(session) : restoring(session), measurement));
  });
  return row;
}

void add_checkpoint_peers(Row& row, const Options& options, const Measurement& measurement) {
  if (row.name != save_case && row.name != restore_case) return;
  const Peers peers;
  const detail::TemporaryFolder folder("muster-bench-");
  const bool saves = row.name == save_case;
  std::vector<Program> programs{{ours, on_ranks(options.ranks, {"job", "checkpoint", row.name})}};
  for (const auto& name :
       saves ? std::vector<std::string>{"torch_save", "dcp"} : std::vector<std::string>{"torch_load"})
    if (auto peer = peers.torchrun(name, options.ranks,
                                   {name, folder.path().string(), std::to_string(megabytes), std::to_string(tensors)}))
      programs.push_back(std::move(*peer));
  if (programs.size() == 1) {
    row.notes.push_back(Peers::note_of_missing(saves ? "torch_save, dcp" : "torch_load", "torch", "torch"));
    return;
  }
  add_peers(row, alternate(programs, measurement,
                           [](const Finished&, const auto& result) { return result.at("ms").template get<double>(); }));
  row.notes.push_back(
      saves ? "torch_save (rank 0 alone) and dcp are processes of their own, in rounds beside processes of muster"
            : "torch_load maps its file (mmap) and copies what is in it; muster verifies it as well; both files are in "
              "the system's cache");
}

}  // namespace

void time_checkpoints(Session& session, const std::string& which) {
  const auto all = which == save_case ? saving(session) : restoring(session);
  const auto ms = measure_candidates(session, {all.front()}, {.rounds = {3}}).ms.front();
  if (session.world_rank() == 0) std::cout << nlohmann::json{{"ms", median(ms)}} << std::endl;
}

Benchmark checkpoint() {
  return {.cases = {save_case, restore_case, stall_case, fused_stall_case},
          .measure_in_process = measure_checkpoint,
          .measure_processes = add_checkpoint_peers};
}

}  // namespace muster::bench
