// Checkpoints made by the user: reporting them, resuming from them, starting from them.
#include "support/job.hpp"

#include "base/file.hpp"
#include "muster/muster.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>
#include <utility>

namespace muster::given_checkpoint_test {
namespace {

using test::line;
using test::run;
using test::world;

TorchTrainerOptions named(std::string name) {
  return {.run_config = {.name = std::move(name)}, .datasets = {{"train", line()}}};
}

void make_folder(const std::filesystem::path& folder, const std::string& file) {
  if (world().rank() == 0) {
    detail::make_directories(folder);
    detail::write_file(folder / file, "the user's own");
  }
  world().barrier();
}

TEST(GivenCheckpoint, FromDictIsReportedAndLoadedAgain) {
  const auto storage = test::shared_folder();
  const auto train = [](Session& session, const Config&) {
    auto net = session.prepare_model(torch::nn::Linear(3, 2));
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    std::int64_t epoch = 0;
    if (const auto checkpoint = session.get_checkpoint()) {
      checkpoint->load("model", net);
      epoch = checkpoint->to_dict().values.at("epoch").get<std::int64_t>() + 1;
    }
    const double before = net->weight.sum().item<double>();
    EXPECT_EQ(before == 6 * 3.0, epoch > 0) << before;
    for (; epoch < 3; ++epoch) {
      torch::NoGradGuard none;
      net->weight.fill_(double(epoch + 1));
      session.report({{"epoch", epoch}},
                     Checkpoint::from_dict({{"model", net}, {"optimizer", optimizer}, {"epoch", epoch}}));
    }
  };
  const auto [code, result] = run({storage, {}, named("dict")}, train);
  EXPECT_EQ(code, 0) << (result->error ? result->error->what() : "");
  ASSERT_TRUE(result->checkpoint);
  EXPECT_EQ(list_checkpoints(storage / "dict").size(), 3u);
  EXPECT_EQ(verify_checkpoint(result->checkpoint->path()).problem, "");
  const auto saved = result->checkpoint->to_dict();
  EXPECT_EQ(saved.tensors.at("model/weight").sum().item<double>(), 18.0);
  EXPECT_EQ(saved.values.at("epoch"), 2);
  EXPECT_EQ(run({storage, {"--resume", "must"}, named("dict")}, train).first, 0);
}

TEST(GivenCheckpoint, WhatWasSavedIsReportedAgain) {
  const auto storage = test::shared_folder();
  make_folder(storage / "mine", "notes.txt");
  const auto [code, result] = run({storage, {}, named("again")}, [&](Session& session, const Config&) {
    double best = 0.5, other = 7;
    session.report({{"a", 1}}, session.state({{"best", best}}), Checkpoint::from_directory(storage / "mine"));
    session.report({{"a", 2}}, *session.get_checkpoint());
    best = 0.75;
    session.report({{"a", 3}}, session.state({{"best", best}}), Checkpoint::from_dict({{"other", other}}));
    // Of an entry that both have, the state's is saved.
    session.report({{"a", 4}}, session.state({{"best", best}}), *session.get_checkpoint());
  });
  EXPECT_EQ(code, 0) << (result->error ? result->error->what() : "");
  const auto all = list_checkpoints(storage / "again");
  ASSERT_EQ(all.size(), 4u);
  for (const auto& info : all) EXPECT_EQ(verify_checkpoint(info.path).problem, "");
  EXPECT_EQ(Checkpoint::from_directory(all[1].path).to_dict().values, (Json{{"best", 0.5}}));
  EXPECT_EQ(detail::read_file(all[1].path / "notes.txt"), "the user's own");
  for (const int at : {2, 3})
    EXPECT_EQ(Checkpoint::from_directory(all[static_cast<std::size_t>(at)].path).to_dict().values,
              (Json{{"best", 0.75}, {"other", 7.0}}));
}

TEST(GivenCheckpoint, RowsOfAllRanksAreOneEntry) {
  const auto storage = test::shared_folder();
  const auto given = [](int rank) {
    double number = rank;
    auto row = torch::full({2}, 10.0 + rank);
    return Checkpoint::from_dict(StateEntries{{"number", per_rank(number)}, {"row", per_rank(row)}});
  };
  const auto [code, result] = run({storage, {}, named("rows")}, [&](Session& session, const Config&) {
    session.report({{"a", 1}}, given(session.world_rank()));
    double number = -1;
    auto row = torch::zeros({2});
    session.get_checkpoint()->load("number", per_rank(number));
    session.get_checkpoint()->load("row", per_rank(row));
    EXPECT_EQ(number, session.world_rank());
    EXPECT_TRUE(torch::equal(row, torch::full({2}, 10.0 + session.world_rank())));
  });
  EXPECT_EQ(code, 0) << (result->error ? result->error->what() : "");
  auto options = named("started");
  options.resume_from_checkpoint = given(world().rank() + 1);
  const auto [started_code, started] = run({storage, {}, options}, [&](Session& session, const Config&) {
    double number = -1;
    auto row = torch::zeros({2});
    EXPECT_TRUE(session.state({{"number", per_rank(number)}, {"row", per_rank(row)}}).restore());
    EXPECT_EQ(number, session.world_rank() + 1);
    EXPECT_TRUE(torch::equal(row, torch::full({2}, 11.0 + session.world_rank())));
  });
  EXPECT_EQ(started_code, 0) << (started->error ? started->error->what() : "");
}

TEST(GivenCheckpoint, OfSeveralRanksIsUnitedAsFilesAre) {
  const auto storage = test::shared_folder();
  const int last = world().size() - 1;
  const auto [code, result] = run({storage, {}, named("several")}, [&](Session& session, const Config&) {
    const int rank = session.world_rank();
    auto mine = torch::full({70'000}, double(rank)), common = torch::full({3}, 5.0);
    double of_rank = rank;
    const StateEntries entries{{"differs", mine}, {"common", common}, {"only " + std::to_string(rank), of_rank}};
    session.report({{"a", 1}}, Checkpoint::from_dict(entries));
    // On one rank only, as in "if rank == 0".
    if (rank == last)
      session.report({{"a", 2}}, Checkpoint::from_dict({{"mine", mine}}));
    else
      session.report({{"a", 2}});
  });
  EXPECT_EQ(code, 0) << (result->error ? result->error->what() : "");
  const auto all = list_checkpoints(storage / "several");
  ASSERT_EQ(all.size(), 2u);
  const auto first = Checkpoint::from_directory(all[0].path).to_dict();
  EXPECT_TRUE(torch::equal(first.tensors.at("differs"), torch::zeros(70'000))) << "rank 0's, never a mixture";
  EXPECT_TRUE(torch::equal(first.tensors.at("common"), torch::full({3}, 5.0)));
  for (int rank = 0; rank <= last; ++rank) EXPECT_EQ(first.values.at("only " + std::to_string(rank)), double(rank));
  const auto second = Checkpoint::from_directory(all[1].path).to_dict();
  EXPECT_TRUE(torch::equal(second.tensors.at("mine"), torch::full({70'000}, double(last))));
}

TEST(GivenCheckpoint, AFileThatIsAFolderOfAnotherRankIsRefused) {
  const auto storage = test::shared_folder();
  const auto folder = storage / ("of_rank_" + std::to_string(world().rank()));
  detail::make_directories(folder / (world().rank() == 0 ? "." : "name"));
  detail::write_file(folder / (world().rank() == 0 ? "name" : "name/file"), "the user's own");
  const auto [code, result] = run({storage, {}, named("folder")}, [&](Session& session, const Config&) {
    session.report({{"a", 1}}, Checkpoint::from_directory(folder));
  });
  EXPECT_EQ(code, world().size() == 1 ? 0 : static_cast<int>(ExitCode::usage))
      << (result && result->error ? result->error->what() : "");
}

TEST(GivenCheckpoint, APlainDirectoryReachesGetCheckpoint) {
  const auto storage = test::shared_folder();
  make_folder(storage / "plain", "weights.bin");
  auto options = named("from_plain");
  options.resume_from_checkpoint = Checkpoint::from_directory(storage / "plain");
  const auto [code, result] = run({storage, {}, options}, [&](Session& session, const Config&) {
    double value = 1;
    auto state = session.state({{"value", value}});
    EXPECT_FALSE(state.restore()) << "there is nothing of the state in it";
    ASSERT_TRUE(session.get_checkpoint());
    EXPECT_EQ(detail::read_file(session.get_checkpoint()->path() / "weights.bin"), "the user's own");
    EXPECT_EQ(*session.epochs(2).begin(), 0);
    session.report({{"a", 1}}, state);
  });
  EXPECT_EQ(code, 0) << (result->error ? result->error->what() : "");
  EXPECT_EQ(result->metrics.at("training_iteration"), 1);
  EXPECT_EQ(result->metrics_history.size(), 1u);
}

TEST(GivenCheckpoint, RestoreTakesFromADictWhatIsThere) {
  const auto storage = test::shared_folder();
  auto weight = torch::full({4}, 3.0 + world().rank());  // each rank's own: the lowest rank's is taken
  auto options = named("from_dict");
  options.resume_from_checkpoint = Checkpoint::from_dict({{"weight", weight}});
  const auto [code, result] = run({storage, {}, options}, [&](Session& session, const Config&) {
    auto mine = torch::zeros(4), unfit = torch::zeros(5);
    double other = 7;
    EXPECT_THROW(session.state({{"other", other}, {"weight", unfit}}).restore(), Error);
    EXPECT_EQ(unfit.sum().item<double>(), 0) << "a misfit changes nothing";
    EXPECT_TRUE(session.state({{"weight", mine}, {"other", other}}).restore());
    EXPECT_EQ(mine.sum().item<double>(), 12);
    EXPECT_EQ(other, 7);
    EXPECT_FALSE(session.state({{"other", other}}).restore());
    EXPECT_EQ(*session.epochs(2).begin(), 0) << "the run is at its beginning";
    EXPECT_EQ(session.global_step(), 0);
  });
  EXPECT_EQ(code, 0) << (result->error ? result->error->what() : "");
}

TEST(GivenCheckpoint, OnSomeRanksOnlyIsRefused) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  double value = 1;
  auto options = named("some");
  if (world().rank() == 0) options.resume_from_checkpoint = Checkpoint::from_dict({{"value", value}});
  EXPECT_EQ(run({test::shared_folder(), {}, options}, [](Session&, const Config&) { FAIL(); }).first, 64);
}

TEST(GivenCheckpoint, AForeignManifestIsRefused) {
  const auto storage = test::shared_folder();
  make_folder(storage / "foreign", "manifest.json");
  const auto [code, result] = run({storage, {}, named("foreign run")}, [&](Session& session, const Config&) {
    session.report({{"a", 1}}, Checkpoint::from_directory(storage / "foreign"));
  });
  EXPECT_EQ(code, 64);
}

}  // namespace
}  // namespace muster::given_checkpoint_test
