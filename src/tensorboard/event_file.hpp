// Event files for TensorBoard. They consist of records in the TFRecord format; each record is a protobuf message
// tensorflow.Event (tensorflow/core/util/event.proto and framework/summary.proto of TensorFlow, plugins/hparams of
// TensorBoard).
//
//   length     8 bytes, little endian
//   checksum   4 bytes, of the length: CRC-32C, rotated right by 15 bits, plus 0xa282ead8
//   message    `length` bytes
//   checksum   4 bytes, of the message
#pragma once

#include "base/file.hpp"
#include "muster/json.hpp"
#include "tensorboard/histogram.hpp"
#include "tensorboard/png.hpp"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace muster::detail::tensorboard {

/// One event file. Added events are kept in memory until they are 64 KiB, an event is added two seconds or more after
/// the last write, or flush() is called. All functions but the destructor throw an Error (ExitCode::retry) if writing
/// fails.
class EventFile {
 public:
  /// Creates `folder`/events.out.tfevents.SECONDS.HOST.PID, which TensorBoard reads after the existing files, unless
  /// their SECONDS are more than an hour ahead. The new file makes TensorBoard hide the values of the existing files
  /// from `first_step` on, since a resumed run repeats those steps.
  EventFile(const std::filesystem::path& folder, std::int64_t first_step);
  /// Writes the events that are still in memory.
  ~EventFile();

  void add_scalar(std::string_view tag, double value, std::int64_t step);
  void add_image(std::string_view tag, const Image& image, std::int64_t step);
  void add_histogram(std::string_view tag, const Histogram& histogram, std::int64_t step);
  /// Adds the run's settings. Nested keys are joined by "."; a list is shown as JSON.
  void add_hyperparameters(const Json& config, const std::string& run);
  /// Adds the mark of a finished run, and flushes. Called once, at the end of the run.
  void add_success();
  void flush();

 private:
  /// `fill` adds the fields of an Event to a protozero writer.
  template <class Fill>
  void add(std::int64_t step, const Fill& fill);
  /// `fill` adds the fields of a Summary.Value.
  template <class Fill>
  void add_value(std::string_view tag, std::int64_t step, const Fill& fill);

  File file_;
  std::string waiting_;  // records that are not written yet
  std::string message_;  // kept to use its memory again
  std::chrono::steady_clock::time_point last_flush_ = std::chrono::steady_clock::now();
};

}  // namespace muster::detail::tensorboard
