// Averages the gradients of one module over the ranks, inside backward().
//
// Hooks in the parameters call it. A gradient is weighted by the rank's samples before it is added to .grad, copied
// into its bucket afterwards, and a bucket travels as soon as it is full and all before it are on their way; at the end
// of backward() the averages are copied back. Since what lies in .grad is weighted already, it may have been added up
// over several passes, with or without averaging in between: the average of the sum is right.
//
// The contract:
// - All ranks run the same backward passes over the module, in the same order. In a pass each rank reaches at least one
//   parameter; which ones may differ. A rank that reaches none never calls the reducer, and the others end with the
//   time limit of the process group.
// - The process group serves this reducer alone: the buckets of two models in one backward() may start in different
//   orders on different ranks.
// - Parameters are frozen and unfrozen on all ranks alike. One that was frozen from the start costs nothing until it is
//   unfrozen.
// - An exception in backward() leaves .grad as it stands; zero_grad() and go on, on all ranks alike. A rank that goes
//   on where others had no exception is an error on those.
#pragma once

#include "data/step_weight.hpp"
#include "muster/model.hpp"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d
namespace torch::nn {
class Module;
}

namespace muster::model {

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  /// `no_sync_depth` 0: gradients are averaged. Local; install() makes it work.
  Reducer(std::shared_ptr<torch::nn::Module> module, c10::intrusive_ptr<c10d::ProcessGroup> group,
          std::shared_ptr<const data::StepWeight> weight, std::shared_ptr<const int> no_sync_depth,
          const ModelOptions& options);
  ~Reducer();

  /// Hooks this reducer into its module's parameters. Once.
  void install();

  /// An Error that names the first parameter that was moved, resized, replaced, added or removed since.
  void check_parameters() const;

  // Called by the hooks, on the thread that runs backward().
  /// What is to be added to the parameter's .grad in place of `gradient`.
  at::Tensor weigh(std::size_t parameter, const at::Tensor& gradient);
  /// The parameter's .grad has grown.
  void accumulated(std::size_t parameter);

 private:
  struct Parameter;
  struct Bucket;
  struct Pass;

  void make_buckets();
  std::shared_ptr<Pass> begin();
  void load(Parameter& parameter);
  void issue_full();
  void issue(Bucket& bucket);
  void issue_rest();
  void finish();
  void store(Parameter& parameter, float used);
  void drain();

  std::shared_ptr<torch::nn::Module> module_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<const data::StepWeight> weight_;
  std::shared_ptr<const int> no_sync_depth_;
  ModelOptions options_;
  int world_;
  at::Tensor scale_;  ///< 1 / world

  std::vector<std::pair<std::string, const void*>> names_;  ///< each name and its tensor, as they were
  std::vector<Parameter> parameters_;                       ///< each tensor once
  std::vector<Bucket> buckets_;

  // The pass under way.
  std::weak_ptr<Pass> pass_;  ///< autograd owns it; it is gone when backward() has returned or thrown
  bool open_ = false;         ///< some buckets may have been issued, and not all are finished
  std::size_t issued_ = 0;    ///< buckets, from the first
};

}  // namespace muster::model
