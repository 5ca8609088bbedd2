// Preprocessors: fitted once on the training set, applied to every dataset, saved with the checkpoint. The trainer
// leaves one that is fitted already as it is.
//
//   trainer options: .preprocessor = muster::chain({muster::standard_scaler({"x"}), muster::label_encoder("y")})
#pragma once

#include <muster/communicator.hpp>
#include <muster/dataset.hpp>
#include <muster/json.hpp>

#include <memory>
#include <string>
#include <vector>

namespace muster {

/// A transformation of batches with a fitted state. Users derive their own.
class Preprocessor {
 public:
  virtual ~Preprocessor() = default;
  /// Learns from the dataset; each rank reads its share and the results are joined. Collective.
  virtual void fit(const Dataset& dataset, const Communicator& communicator) = 0;
  /// Whether it has learned what transform() needs, by fit() or load_state(). One that has nothing to learn says true.
  /// One that does not override this is fitted again in every run.
  virtual bool fitted() const { return false; }

  /// Changes the batch, and neither the number of its rows (an Error with ExitCode::data: weights, steps and positions
  /// count the samples of the dataset) nor the preprocessor. A class overrides one of the two.
  ///
  /// This one is called on any thread, and reads ahead. Random numbers come from `generator`, on the CPU:
  ///
  ///   void transform(muster::Batch& batch, at::Generator& generator) const override {
  ///     batch.set("x", batch["x"] + 0.1 * torch::randn(batch["x"].sizes(), generator));
  ///   }
  ///
  /// In a pass it is seeded from the run's seed, the dataset's name, the epoch, which pass of the epoch it is (of those
  /// that do not train: after which step, too), and the position of the batch's first sample. So a batch (with
  /// ScalingConfig::virtual_workers, a micro-batch) that begins at the same position and has as many samples gets the
  /// same numbers, however far the pass reads ahead, after a resume, and on whichever rank. In a pass over a stream the
  /// worker and the number of its batch take the place of the position. Dataset::read() and fitting have a seed that
  /// depends on the first sample alone, predictors one that is always the same.
  virtual void transform(Batch& batch, at::Generator& generator) const;
  /// The same for a class that takes no generator. In a pass it is called on the thread that iterates, in the place of
  /// the batch and not ahead. torch's default generator of the CPU has the state of the one above meanwhile, and its
  /// own again afterwards.
  virtual void transform(Batch& batch) const;

  /// The fitted state as JSON, and back.
  virtual Json state() const = 0;
  virtual void load_state(const Json& state) = 0;
};

using PreprocessorPtr = std::shared_ptr<Preprocessor>;

/// (x − mean) / deviation per feature (the last dimension of a sample; one feature for scalars), population deviation,
/// 1 where that is 0. The moments of blocks of 256 samples are joined pairwise by the parallel formula of Chan, Golub
/// and LeVeque (1979): the same bits at any number of ranks, as those of the others are.
PreprocessorPtr standard_scaler(std::vector<std::string> columns);
/// (x − min) / (max − min) per feature; 0 where max = min.
PreprocessorPtr min_max_scaler(std::vector<std::string> columns);
/// Integers to 0 … k−1 in ascending order of the values seen; a value not seen in fit is an Error. What it is applied
/// to may hold floats: 2.0 is the class 2, and 2.7 an Error (ExitCode::data).
PreprocessorPtr label_encoder(std::string column);
/// Integer columns to float vectors [k] with a single 1; a value not seen in fit becomes all zeros. Floats as above.
PreprocessorPtr one_hot_encoder(std::vector<std::string> columns);
/// One after the other; each is fitted on what the ones before it give. Of a chain that is fitted in part, fit() leaves
/// the fitted ones as they are.
PreprocessorPtr chain(std::vector<PreprocessorPtr> steps);

}  // namespace muster
