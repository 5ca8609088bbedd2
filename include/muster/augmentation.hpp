// Random augmentation: preprocessors that change each sample at random, and need no fitting.
//
//   auto train = muster::Dataset("train.h5").transform(muster::chain(
//       {muster::random_crop({"image", "mask"}, {32, 32}, /*padding=*/4), muster::random_flip({"image", "mask"})}));
//
// Give them to the training set only, as here: the trainer's preprocessor is applied to every dataset, also to those
// for validation. It is applied after the training set's own preprocessors, so it is fitted on augmented samples.
//
// Each sample of a batch gets its own random numbers, from the generator that Preprocessor::transform() describes.
// Columns that are named together get the same crop and the same flip, such as an image and its mask. A list without
// columns, or with a column twice, is an Error (ExitCode::usage). Dimensions are counted within a sample: in a column
// of shape [rows, 3, 32, 32], dimension 0 is the channels and −1 is the width.
#pragma once

#include <muster/detail/export.hpp>
#include <muster/preprocessor.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace muster {

/// Cuts a box of `sizes` from the last sizes.size() dimensions of each sample, at a place that is drawn uniformly.
/// These dimensions are first padded with `padding` zeros on each side. An Error (ExitCode::data) unless all columns
/// have the same sizes in these dimensions, and at least `sizes` with the padding. An Error (ExitCode::usage) if there
/// is no size, if one is less than 1, or if `padding` is negative.
MUSTER_API PreprocessorPtr random_crop(std::vector<std::string> columns, std::vector<std::int64_t> sizes,
                                       std::int64_t padding = 0);
/// Reverses `dimension` of a sample with the given probability. An Error (ExitCode::data) if a column has no such
/// dimension, and (ExitCode::usage) if `probability` is not between 0 and 1.
MUSTER_API PreprocessorPtr random_flip(std::vector<std::string> columns, std::int64_t dimension = -1,
                                       double probability = 0.5);
/// Adds Gaussian noise of mean 0 and the given standard deviation to each value. Each column gets different noise. An
/// Error (ExitCode::data) if a column does not hold floats, and (ExitCode::usage) if `deviation` is negative or not
/// finite.
MUSTER_API PreprocessorPtr random_noise(std::vector<std::string> columns, double deviation);

}  // namespace muster
