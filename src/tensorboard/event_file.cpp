#include "tensorboard/event_file.hpp"

#include "base/host.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "muster/error.hpp"

#include <isa-l/crc.h>
#include <unistd.h>
#include <protozero/pbf_builder.hpp>
#include <protozero/pbf_writer.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <ctime>
#include <functional>
#include <utility>

namespace muster::detail::tensorboard {

namespace fs = std::filesystem;

namespace {

using protozero::pbf_writer;

constexpr std::size_t max_waiting_bytes = 64 << 10;
constexpr std::chrono::seconds flush_interval{2};
constexpr std::string_view name_prefix = "events.out.tfevents.";

// Numbers of fields in the protobuf messages; the last two: values of enumerations.
enum class Event : protozero::pbf_tag_type { wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7 };
enum class Value : protozero::pbf_tag_type { tag = 1, simple_value = 2, image = 4, histogram = 5, metadata = 9 };
enum class Hyperparameter : protozero::pbf_tag_type { number = 2, text = 3, boolean = 4 };  // of google.protobuf.Value
constexpr protozero::pbf_tag_type summary_value = 1, session_status = 1;
constexpr int session_start = 1;
constexpr int status_success = 1;

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

std::uint32_t masked_checksum(std::string_view bytes) {
  auto* const begin = reinterpret_cast<unsigned char*>(const_cast<char*>(bytes.data()));
  const auto crc = ~::crc32_iscsi(begin, static_cast<int>(bytes.size()), 0xffffffff);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8;
}

template <class Number>
void append_number(std::string& to, Number number) {
  std::array<char, sizeof number> bytes;
  std::memcpy(bytes.data(), &number, sizeof number);
  to.append(bytes.data(), bytes.size());
}

void append_record(std::string& to, std::string_view message) {
  std::string length;
  append_number(length, static_cast<std::uint64_t>(message.size()));
  to += length;
  append_number(to, masked_checksum(length));
  to += message;
  append_number(to, masked_checksum(message));
}

/// Returns a name that sorts behind the event files in the folder, since TensorBoard reads them in the order of names:
/// its second is later than theirs. Files more than an hour ahead of the clock do not count.
std::string new_name(const fs::path& folder) {
  std::int64_t second = std::time(nullptr);
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    const auto name = at->path().filename().string();
    if (!name.starts_with(name_prefix)) continue;
    std::int64_t other = 0;
    std::from_chars(name.data() + name_prefix.size(), name.data() + name.size(), other);
    // A clock was wrong when a file of the far future was written. If it counted, all later names would be as wrong.
    if (other < second + 3600) second = std::max(second, other + 1);
  }
  return str(name_prefix, formatted("%010lld.", static_cast<long long>(second)), host_name(), ".", ::getpid());
}

/// Calls use(name, value) for each value in `config` that is not an object. The name has all keys, joined by ".".
void for_each_setting(const Json& config, const std::string& prefix,
                      const std::function<void(const std::string&, const Json&)>& use) {
  for (const auto& [key, value] : config.items()) {
    const auto name = prefix.empty() ? key : prefix + "." + key;
    value.is_object() ? for_each_setting(value, name, use) : use(name, value);
  }
}

/// Adds a value that TensorBoard shows in its table of hyperparameters instead of as a curve. `fill` adds the fields of
/// the plugin's message HParamsPluginData.
template <class Fill>
void add_to_table(protozero::pbf_builder<Event>& event, const std::string& tag, const Fill& fill) {
  std::string content;
  pbf_writer data(content);
  fill(data);
  pbf_writer summary(event, static_cast<protozero::pbf_tag_type>(Event::summary));
  pbf_writer value(summary, summary_value);
  value.add_string(static_cast<protozero::pbf_tag_type>(Value::tag), tag);
  pbf_writer metadata(value, static_cast<protozero::pbf_tag_type>(Value::metadata));
  pbf_writer plugin(metadata, 1);
  plugin.add_string(1, "hparams");
  plugin.add_bytes(2, content);
}

}  // namespace

EventFile::EventFile(const fs::path& folder, std::int64_t first_step)
    : file_(folder / new_name(folder), File::Mode::create) {
  add(0, [](auto& event) { event.add_string(Event::file_version, "brain.Event:2"); });
  add(first_step, [](auto& event) {
    pbf_writer log(event, static_cast<protozero::pbf_tag_type>(Event::session_log));
    log.add_enum(session_status, session_start);
  });
}

EventFile::~EventFile() {
  try {
    flush();
  } catch (const Error&) {
    // These events are lost, but a resumed run repeats the steps after its checkpoint, and adds them again.
  }
}

template <class Fill>
void EventFile::add(std::int64_t step, const Fill& fill) {
  message_.clear();
  {
    protozero::pbf_builder<Event> event(message_);
    event.add_double(Event::wall_time, now());
    event.add_int64(Event::step, step);
    fill(event);
  }
  append_record(waiting_, message_);
  if (waiting_.size() >= max_waiting_bytes || std::chrono::steady_clock::now() - last_flush_ >= flush_interval) flush();
}

void EventFile::flush() {
  last_flush_ = std::chrono::steady_clock::now();
  file_.append(std::exchange(waiting_, {}));
}

template <class Fill>
void EventFile::add_value(std::string_view tag, std::int64_t step, const Fill& fill) {
  add(step, [&](auto& event) {
    pbf_writer summary(event, static_cast<protozero::pbf_tag_type>(Event::summary));
    protozero::pbf_builder<Value> value(summary, summary_value);
    value.add_string(Value::tag, tag.data(), tag.size());
    fill(value);
  });
}

void EventFile::add_scalar(std::string_view tag, double number, std::int64_t step) {
  add_value(tag, step, [&](auto& value) { value.add_float(Value::simple_value, static_cast<float>(number)); });
}

void EventFile::add_image(std::string_view tag, const Image& image, std::int64_t step) {
  const auto png = png_of(image);
  add_value(tag, step, [&](auto& value) {
    pbf_writer picture(value, static_cast<protozero::pbf_tag_type>(Value::image));
    picture.add_int32(1, image.height);
    picture.add_int32(2, image.width);
    picture.add_int32(3, image.channels);
    picture.add_bytes(4, png);
  });
}

void EventFile::add_histogram(std::string_view tag, const Histogram& histogram, std::int64_t step) {
  add_value(tag, step, [&](auto& value) {
    pbf_writer message(value, static_cast<protozero::pbf_tag_type>(Value::histogram));
    message.add_double(1, histogram.min);
    message.add_double(2, histogram.max);
    message.add_double(3, histogram.count);
    message.add_double(4, histogram.sum);
    message.add_double(5, histogram.sum_of_squares);
    message.add_packed_double(6, histogram.limits.begin(), histogram.limits.end());
    message.add_packed_double(7, histogram.counts.begin(), histogram.counts.end());
  });
}

void EventFile::add_hyperparameters(const Json& config, const std::string& run) {
  add(0, [&](auto& event) {
    add_to_table(event, "_hparams_/session_start_info", [&](pbf_writer& data) {
      pbf_writer info(data, 3);
      for_each_setting(config, "", [&](const std::string& name, const Json& setting) {
        pbf_writer entry(info, 1);
        entry.add_string(1, name);
        protozero::pbf_builder<Hyperparameter> value(entry, 2);
        if (setting.is_boolean())
          value.add_bool(Hyperparameter::boolean, setting.get<bool>());
        else if (setting.is_number())
          value.add_double(Hyperparameter::number, setting.get<double>());
        else
          value.add_string(Hyperparameter::text, setting.is_string() ? setting.get<std::string>() : json_text(setting));
      });
      info.add_string(4, run);
      info.add_double(5, now());
    });
  });
}

void EventFile::add_success() {
  add(0, [&](auto& event) {
    add_to_table(event, "_hparams_/session_end_info", [&](pbf_writer& data) {
      pbf_writer info(data, 4);
      info.add_enum(1, status_success);
      info.add_double(2, now());
    });
  });
  flush();
}

}  // namespace muster::detail::tensorboard
