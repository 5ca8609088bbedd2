// A run that reports as often as its settings say, and says what it finds and what is saved; the scripts beside it do
// to it what they will. Lines of its output: "pid P", "from N" when it has restored report N, whole, "saved N" when a
// report has returned, or with --behind when the next one has, and from each rank "rank R: failed N: …" when one has
// thrown, after which it goes on. --fast: checkpoints pass through STORAGE/fast. --validate: each is validated, and its
// row has "twice" its number then. --score: the best checkpoints by the number are kept.
//
// Between reports each rank tries to remove STORAGE/step, which is not there: a step, for who watches system calls.
#include "muster/checkpoint.hpp"
#include "muster/error.hpp"
#include "muster/launch.hpp"
#include "muster/trainer.hpp"
#include "support/folder.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <fcntl.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

at::Tensor values_of(std::int64_t number, std::int64_t count) { return at::arange(count, at::kDouble).add(number); }

/// This worker's own file: in a folder of its own, as long as a few pages.
fs::path own_file(const fs::path& in, int rank) { return in / "notes" / ("rank_" + std::to_string(rank) + ".txt"); }

std::string text_of(std::int64_t number) {
  std::string text;
  for (int line = 0; line < 1000; ++line) text += "report " + std::to_string(number) + "\n";
  return text;
}

/// In one piece, since some launchers mix the ranks' output piece by piece.
void say(const std::string& line) { std::fputs((line + "\n").c_str(), stdout), std::fflush(stdout); }

void check_whole(const muster::Session& session, const at::Tensor& values, std::int64_t number) {
  std::stringstream text;
  text << std::ifstream(own_file(session.get_checkpoint()->path(), session.world_rank())).rdbuf();
  if (text.str() != text_of(number)) throw std::runtime_error("the user's file is not that of its report");
  if (!at::equal(values, values_of(number, values.numel())))
    throw std::runtime_error("the values are not those of their report");
}

/// A file that takes what the file system has, but for so many bytes.
class Ballast {
 public:
  Ballast(fs::path path, std::int64_t room) : path_(std::move(path)) {
    const int file = ::open(path_.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    const std::vector<char> zeroes(4096);
    std::int64_t bytes = 0;
    for (ssize_t wrote; (wrote = ::write(file, zeroes.data(), zeroes.size())) > 0;) bytes += wrote;
    if (::ftruncate(file, std::max<std::int64_t>(0, bytes - room)) != 0) throw std::runtime_error("no ballast");
    ::close(file);
  }
  ~Ballast() { fs::remove(path_); }

 private:
  fs::path path_;
};

void train(muster::Session& session, const muster::Config& config, const fs::path& storage, bool behind,
           const muster::ReportOptions& options) {
  say("pid " + std::to_string(::getpid()));
  const bool first = session.world_rank() == 0;
  std::int64_t number = 0;
  auto values = values_of(number, config.at("numbers"));
  auto state = session.state({{"number", number}, {"values", values}});
  if (state.restore()) check_whole(session, values, number);
  if (first) say("from " + std::to_string(number));
  const muster::test::Folder folder;
  fs::create_directory(folder / "notes");
  const auto files = muster::Checkpoint::from_directory(folder);
  const std::string ballast = config.at("ballast");
  for (std::int64_t report = 0; report < config.at("reports"); ++report) {
    ::rmdir((storage / "step").c_str());
    ++number;
    values.copy_(values_of(number, values.numel()));
    std::ofstream(own_file(folder, session.world_rank())) << text_of(number);
    std::optional<Ballast> full;
    if (!ballast.empty() && first) full.emplace(ballast, report * config.at("room").get<std::int64_t>());
    try {
      session.report({{"number", static_cast<double>(number)}}, state, files, options);
    } catch (const muster::Error& error) {
      if (!error.agreed()) throw;
      say("rank " + std::to_string(session.world_rank()) + ": failed " + std::to_string(number) + ": " + error.what());
      continue;
    }
    if (first) say("saved " + std::to_string(behind ? number - 1 : number));
  }
}

muster::Config twice(muster::Session&, const muster::Checkpoint& checkpoint) {
  std::int64_t number = 0;
  checkpoint.load("number", number);
  return {{"twice", static_cast<double>(2 * number)}};
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  int keep = 1;
  bool behind = false, fast = false, validate = false, score = false;
  launch.app().add_option("--keep", keep);
  launch.app().add_flag("--behind", behind);
  launch.app().add_flag("--fast", fast);
  launch.app().add_flag("--validate", validate);
  launch.app().add_flag("--score", score);
  return launch.run([&] {
    const auto storage = *launch.flags().storage, tier = fast ? storage / "fast" : fs::path();
    if (fast) fs::create_directory(tier);
    // A finished run is trained again if its settings differ: `start` is different each time.
    const auto result =
        muster::TorchTrainer(
            launch,
            [&](muster::Session& session, const muster::Config& config) {
              train(session, config, storage, behind, {.validation = validate});
            },
            {.train_loop_config = {{"reports", 2}, {"start", 0}, {"ballast", ""}, {"room", 0}, {"numbers", 20'000}},
             .run_config = {.checkpoint_config = {.num_to_keep = keep,
                                                  .checkpoint_score_attribute = score ? "number" : "",
                                                  .async_save = behind,
                                                  .fast_tier = tier}},
             .validation = {.function = twice}})
            .fit();
    if (behind && !result.error && launch.communicator().rank() == 0) {
      const auto last = result.metrics.at("number").get<double>();
      say("saved " + std::to_string(static_cast<std::int64_t>(last)));
    }
    return result;
  });
}
