#include "muster/process_group.hpp"

#include "base/duration.hpp"
#include "comm/on_ranks.hpp"
#include "comm/timeout.hpp"
#include "group/backends.hpp"
#include "group/mpi_backend.hpp"
#include "group/mpi_store.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <vector>

namespace muster {

using c10d::PrefixStore;
using c10d::ProcessGroup;

namespace {

/// The store of a group that has only muster's own backend, which needs no store. The ranks share nothing in it. So
/// every call throws an Error, instead of letting code wait in vain for another rank's key.
class NoStore final : public c10d::Store {
 public:
  using Bytes = std::vector<std::uint8_t>;
  c10::intrusive_ptr<c10d::Store> clone() override { return c10::make_intrusive<NoStore>(); }
  void set(const std::string&, const Bytes&) override { refuse(); }
  Bytes compareSet(const std::string&, const Bytes&, const Bytes&) override { refuse(); }
  Bytes get(const std::string&) override { refuse(); }
  std::int64_t add(const std::string&, std::int64_t) override { refuse(); }
  bool deleteKey(const std::string&) override { refuse(); }
  bool check(const std::vector<std::string>&) override { refuse(); }
  std::int64_t getNumKeys() override { refuse(); }
  void wait(const std::vector<std::string>&) override { refuse(); }
  void wait(const std::vector<std::string>&, const std::chrono::milliseconds&) override { refuse(); }

 private:
  [[noreturn]] static void refuse() {
    throw Error(ExitCode::usage, "using the store of the process group", "with the backend mpi alone there is none",
                "Send tensors or use a Communicator; with --backend gloo the ranks share a store");
  }
};

}  // namespace

bool has_backend(std::string_view name) {
  return name == "mpi" || (name == "gloo" && detail::group::has_gloo()) ||
         (name == "nccl" && detail::group::has_nccl());
}

c10::intrusive_ptr<ProcessGroup> make_process_group(const Communicator& communicator,
                                                    const ProcessGroupOptions& options) {
  detail::comm::require_same_options(communicator, "the process group",
                                     {{"backend", options.backend}, {"chunk", options.chunk}});
  if (options.chunk == 0)
    throw Error(ExitCode::usage, "starting the process group", "chunk is 0, so that no element would ever be sent",
                "Give the number of elements that go in one MPI call, at least 1");
  const auto choice = detail::group::parse_backends(options.backend);
  const auto timeout = detail::usable_timeout(options.timeout.value_or(detail::comm::timeout(communicator)));
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<NoStore>();  // c10d needs one to construct a group
  if (choice.cpu != "mpi" || choice.cuda != "mpi")
    store = c10::make_intrusive<detail::group::MpiStore>(communicator.duplicate(), timeout);
  auto made = c10::make_intrusive<ProcessGroup>(store, communicator.rank(), communicator.size());
  const auto set_backend = [&](const char* name, ProcessGroup::BackendType type,
                               c10::intrusive_ptr<c10d::Backend> backend) {
    if (choice.cpu == name) made->setBackend(c10::DeviceType::CPU, type, backend);
    if (choice.cuda == name) made->setBackend(c10::DeviceType::CUDA, type, backend);
    if (choice.cpu == name) made->setDefaultBackend(type);
  };
  const auto wanted = [&](std::string_view name) { return choice.cpu == name || choice.cuda == name; };
  if (wanted("gloo")) {
    set_backend("gloo", ProcessGroup::BackendType::GLOO,
                detail::group::make_gloo(communicator, c10::make_intrusive<PrefixStore>("cpu", store), timeout));
    // Other ranks may still be reading addresses from the store, so rank 0 must not leave yet.
    communicator.barrier();
  }
  if (wanted("mpi"))
    set_backend("mpi", ProcessGroup::BackendType::CUSTOM,
                c10::intrusive_ptr<c10d::Backend>(
                    c10::make_intrusive<detail::group::MpiBackend>(communicator.duplicate(), options)));
  if (wanted("nccl"))
    set_backend("nccl", ProcessGroup::BackendType::NCCL,
                detail::group::make_nccl(communicator, c10::make_intrusive<PrefixStore>("cuda", store), timeout));
  return made;
}

}  // namespace muster
