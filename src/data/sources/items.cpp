#include "data/sources/items.hpp"

#include "base/text.hpp"
#include "data/sources/source.hpp"
#include "muster/error.hpp"

#include <ATen/ops/tensor.h>

#include <cstddef>
#include <limits>
#include <utility>

namespace muster::detail::data {
namespace {

enum class ItemKind { none, boolean, whole, real };

const char* name_of(ItemKind kind) { return kind == ItemKind::boolean ? "booleans" : "numbers"; }

std::string brackets(const std::vector<std::int64_t>& shape) {
  return "[" + joined(shape, [](std::int64_t size) { return std::to_string(size); }) + "]";
}

/// The values of one column, row by row.
class ColumnBuilder {
 public:
  explicit ColumnBuilder(std::string key) : key_(std::move(key)) {}

  void add(const Json& value, std::int64_t row, const std::string& doing) {
    const auto refuse = [&](const std::string& fact, const std::string& remedy) {
      throw Error(ExitCode::data, doing, str("\"", key_, "\" of row ", row, " ", fact), remedy);
    };
    std::vector<std::int64_t> shape;
    for (const auto* part = &value; part->is_array(); part = &part->front()) {
      shape.push_back(static_cast<std::int64_t>(part->size()));
      if (part->empty()) refuse("holds an empty array", "Give every row its values");
    }
    if (rows_ == 0) shape_ = shape;
    if (shape != shape_)
      refuse("has the shape " + brackets(shape) + ", in the first row it has " + brackets(shape_),
             "Give arrays of the same shape in all rows");
    add_values(value, 0, refuse);
    ++rows_;
  }

  at::Tensor tensor() const {
    auto shape = shape_;
    shape.insert(shape.begin(), rows_);
    if (kind_ == ItemKind::boolean) return at::tensor(whole_, at::kLong).to(at::kBool).view(shape);
    return (kind_ == ItemKind::whole ? at::tensor(whole_, at::kLong) : at::tensor(real_, at::kDouble)).view(shape);
  }

 private:
  void add_values(const Json& value, std::size_t depth, const auto& refuse) {
    if (depth < shape_.size()) {
      if (!value.is_array() || static_cast<std::int64_t>(value.size()) != shape_[depth])
        refuse("is an array whose parts have different shapes", "Give arrays of the same length at each depth");
      for (const auto& part : value) add_values(part, depth + 1, refuse);
      return;
    }
    const auto kind = value.is_boolean()          ? ItemKind::boolean
                      : value.is_number_integer() ? ItemKind::whole
                      : value.is_number()         ? ItemKind::real
                                                  : ItemKind::none;
    if (kind == ItemKind::none)
      refuse(value.is_array() ? "is an array whose parts have different shapes" : str("is ", value.type_name()),
             "Rows hold numbers, booleans, and arrays of them");
    if (kind_ != ItemKind::none && (kind == ItemKind::boolean) != (kind_ == ItemKind::boolean))
      refuse(str("holds ", name_of(kind), ", but the values before it are ", name_of(kind_)),
             "Give the same kind in all rows");
    if (value.is_number_unsigned() &&
        value.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
      refuse("is larger than an int64 holds", "Give a smaller number, or a float");
    kind_ = std::max(kind_, kind);
    // Both are kept until tensor(), since a later value may turn the column into floats.
    if (kind == ItemKind::boolean) {
      whole_.push_back(value.get<bool>());
    } else {
      whole_.push_back(kind == ItemKind::whole ? value.get<std::int64_t>() : 0);
      real_.push_back(value.get<double>());
    }
  }

  std::string key_;
  std::vector<std::int64_t> shape_;
  ItemKind kind_ = ItemKind::none;
  std::vector<std::int64_t> whole_;
  std::vector<double> real_;
  std::int64_t rows_ = 0;
};

std::string keys_of(const Json& row) {
  std::string keys;
  for (const auto& [key, value] : row.items()) keys += (keys.empty() ? "" : ", ") + key;
  return keys;
}

}  // namespace

std::vector<Batch::Item> columns_of(const Json& rows, const std::string& doing, std::int64_t first) {
  if (!rows.is_array())
    throw Error(ExitCode::data, doing, str("they are one ", rows.type_name(), " and not a list of rows"),
                "Give a list, as in {{{\"x\", 0}, {\"y\", 1}}, {{\"x\", 1}, {\"y\", 3}}}");
  if (rows.empty()) throw Error(ExitCode::data, doing, "there are none", "Give at least one row");
  const bool objects = rows.front().is_object();

  std::vector<std::pair<std::string, ColumnBuilder>> columns;
  if (!objects) columns.emplace_back("item", "item");
  if (objects)
    for (const auto& [key, value] : rows.front().items()) columns.emplace_back(key, key);
  for (auto number = first; const auto& row : rows) {
    const auto refuse = [&](const std::string& fact) {
      throw Error(ExitCode::data, doing, str("row ", number, " ", fact), "Give rows of the same keys");
    };
    if (row.is_object() != objects)
      refuse(objects ? "is no object, but the first row is one" : "is an object, but the first row is not");
    if (objects && row.empty()) refuse("has no keys");
    for (auto& [key, column] : columns) {
      if (objects && !row.contains(key)) refuse("has no \"" + key + "\", its keys are " + keys_of(row));
      column.add(objects ? row.at(key) : row, number, doing);
    }
    if (objects && row.size() > columns.size())
      refuse("has the keys " + keys_of(row) + ", and the first one has " + keys_of(rows.front()));
    ++number;
  }
  std::vector<Batch::Item> items;
  for (const auto& [key, column] : columns) items.emplace_back(key, column.tensor());
  return items;
}

}  // namespace muster::detail::data
