#include "muster/process_group.hpp"

#include "group/backend.hpp"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace muster {

c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const Communicator& communicator,
                                                          const ProcessGroupOptions& options) {
  // c10d wants a store to construct a group; this one stays in the process, and nothing is ever asked of it.
  auto group = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), communicator.rank(),
                                                       communicator.size());
  auto backend = c10::make_intrusive<group::Backend>(communicator.duplicate(), options);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::intrusive_ptr<c10d::Backend>(std::move(backend)));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

}  // namespace muster
