// Reads the rows of result.json, however many, with limited memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string_view>
#include <vector>

namespace muster::tool::report {

/// One line of result.json. Nested objects and short lists are flattened: "rank_times.wait.max", "val_acc[0]". The
/// names and texts are valid until the next row is read.
struct Row {
  struct Number {
    std::string_view name;
    double value;  ///< NaN if the row has null, which stands for NaN or infinity
  };
  struct Text {
    std::string_view name, value;
  };
  std::vector<Number> numbers = {};
  std::vector<Text> texts = {};
  std::vector<std::string_view> left_out = {};  ///< names of long lists and of deeply nested values

  /// Returns the number with this name; NaN if there is none.
  double number(std::string_view name) const;
  /// Returns the text with this name; empty if there is none.
  std::string_view text(std::string_view name) const;
};

struct RowCounts {
  std::uint64_t rows = 0;
  std::uint64_t damaged_lines = 0;  ///< without an incomplete last line, which a killed run leaves
};

/// Calls `visit` for each row; never if there is no such file. Throws an Error if it cannot be read (ExitCode::data, or
/// ExitCode::retry if the disk fails).
RowCounts read_rows(const std::filesystem::path& file, const std::function<void(const Row&)>& visit);

}  // namespace muster::tool::report
