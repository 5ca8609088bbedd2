// Preprocessors: fitted once on the training set, applied to every dataset, saved with the checkpoint. The trainer does
// not fit one that is already fitted.
//
//   trainer options: .preprocessor = muster::chain({muster::standard_scaler({"x"}), muster::label_encoder("y")})
#pragma once

#include <muster/communicator.hpp>
#include <muster/dataset.hpp>
#include <muster/detail/export.hpp>
#include <muster/json.hpp>

#include <memory>
#include <string>
#include <vector>

namespace muster {

/// A transformation of batches with a fitted state. Derive your own classes from it.
class MUSTER_API Preprocessor {
 public:
  virtual ~Preprocessor() = default;
  /// Fits the state to the dataset; each rank reads its share and the results are combined. Collective.
  virtual void fit(const Dataset& dataset, const Communicator& communicator) = 0;
  /// True if the preprocessor has the state that transform() needs, from fit() or load_state(), or needs none. Without
  /// an override, each run that loads no saved state calls fit().
  virtual bool fitted() const { return false; }

  /// Transforms the batch. It must change neither the preprocessor nor the number of rows (an Error with
  /// ExitCode::data), since weights, steps and positions count the samples of the dataset. A class overrides one of the
  /// two overloads.
  ///
  /// The overload with a generator may be called on any thread, ahead of time, and on several threads at once if
  /// Dataset::transform() is given threads. It takes its random numbers from `generator`, on the CPU:
  ///
  ///   void transform(muster::Batch& batch, at::Generator& generator) const override {
  ///     batch.set("x", batch["x"] + 0.1 * torch::randn(batch["x"].sizes(), generator));
  ///   }
  ///
  /// In a pass, the generator is seeded from the run's seed, the dataset's name, the epoch, the number of the pass in
  /// the epoch (for passes that do not train, also the step after which it comes), and the position of the batch's
  /// first sample. So a batch (with ScalingConfig::virtual_workers, a micro-batch) of the same position and size gets
  /// the same numbers, however far the pass reads ahead, after a resume, and on any rank. In a pass over a stream, the
  /// worker and the number of its batch replace the position. In Dataset::read() and fitting the seed depends on the
  /// first sample only; predictors always use the same seed.
  virtual void transform(Batch& batch, at::Generator& generator) const;
  /// The same without a generator. In a pass it is called on the thread that iterates, when the batch is due and not
  /// ahead of time. Meanwhile torch's default CPU generator has the state that `generator` of the other overload would
  /// have; afterwards its own state is restored.
  virtual void transform(Batch& batch) const;

  /// The fitted state as JSON; load_state() restores it.
  virtual Json state() const = 0;
  virtual void load_state(const Json& state) = 0;
};

using PreprocessorPtr = std::shared_ptr<Preprocessor>;

/// (x − mean) / deviation for each feature (the last dimension of a sample; one feature for scalars). The deviation is
/// the population's; a deviation of 0 is replaced by 1. Means and variances of blocks of 256 samples are combined
/// pairwise by the parallel formula of Chan, Golub and LeVeque (1979). All preprocessors here give the same bits at any
/// number of ranks.
MUSTER_API PreprocessorPtr standard_scaler(std::vector<std::string> columns);
/// (x − min) / (max − min) for each feature; 0 where max = min.
MUSTER_API PreprocessorPtr min_max_scaler(std::vector<std::string> columns);
/// Maps integers to 0 … k−1, in ascending order of the values seen in fit(); any other value is an Error. The columns
/// that it transforms may be floats: 2.0 is the class 2, and 2.7 is an Error (ExitCode::data).
MUSTER_API PreprocessorPtr label_encoder(std::string column);
/// Maps integers to float vectors [k] with a single 1; a value not seen in fit() becomes all zeros. Floats are treated
/// as in label_encoder().
MUSTER_API PreprocessorPtr one_hot_encoder(std::vector<std::string> columns);
/// Applies several preprocessors, one after the other; each is fitted on the output of those before it. fit() does not
/// change those that are already fitted.
MUSTER_API PreprocessorPtr chain(std::vector<PreprocessorPtr> steps);

}  // namespace muster
