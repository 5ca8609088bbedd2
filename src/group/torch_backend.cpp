#include "group/torch_backend.hpp"

#include "base/log.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/progress.hpp"
#include "group/mpi_backend.hpp"
#include "muster/process_group.hpp"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

namespace muster::detail::group {
namespace {

class TorchGroup final : public c10d::ProcessGroup {
 public:
  TorchGroup(c10::intrusive_ptr<c10d::Store> store, const c10::intrusive_ptr<c10d::Backend>& backend)
      : ProcessGroup(std::move(store), backend->getRank(), backend->getSize()) {
    setBackend(c10::DeviceType::CPU, BackendType::CUSTOM, backend);
    setDefaultBackend(BackendType::CUSTOM);
  }
  const std::string getBackendName() const override { return getDefaultBackend()->getBackendName(); }
  void setSequenceNumberForGroup() override { getDefaultBackend()->setSequenceNumberForGroup(); }
  std::uint64_t getSequenceNumberForGroup() override { return getDefaultBackend()->getSequenceNumberForGroup(); }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_torch_backend(Communicator ranks, std::chrono::milliseconds timeout) {
  if (!comm::threads_may_call_mpi() && ranks.rank() == 0) {
    static std::once_flag once;
    std::call_once(once, [] {
      log::warn(
          "MPI was initialised without MPI_THREAD_MULTIPLE, so operations advance only where the program waits for "
          "them: DistributedDataParallel does not average during backward().");
    });
  }
  return c10::make_intrusive<MpiBackend>(std::move(ranks), ProcessGroupOptions{.timeout = timeout}, /*for_torch=*/true);
}

c10::intrusive_ptr<c10d::ProcessGroup> make_torch_group(c10::intrusive_ptr<c10d::Store> store,
                                                        c10::intrusive_ptr<c10d::Backend> backend) {
  return c10::make_intrusive<TorchGroup>(std::move(store), backend);
}

}  // namespace muster::detail::group
