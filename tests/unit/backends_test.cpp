// The choice of backends, and the table that they find each other by.
#include "group/backends.hpp"
#include "group/store.hpp"
#include "muster/error.hpp"
#include "muster/process_group.hpp"

#include <gtest/gtest.h>

namespace muster::detail::group::backends_test {
namespace {

TEST(Choice, IsReadFromItsName) {
  const auto choice = [](std::string_view text) {
    const auto made = choose(text);
    return made.cpu + "," + made.cuda;
  };
  EXPECT_EQ(choice("auto"), "mpi,mpi");
  EXPECT_EQ(choice("mpi"), "mpi,mpi");
  EXPECT_EQ(choice("gloo"), "gloo,gloo");
  EXPECT_EQ(choice("nccl"), "mpi,nccl");
  EXPECT_EQ(choice("cpu:gloo"), "gloo,mpi");
  EXPECT_EQ(choice("cuda:gloo"), "mpi,gloo");
  EXPECT_EQ(choice("cuda:nccl"), "mpi,nccl");
  EXPECT_EQ(choice("cpu:gloo,cuda:mpi"), "gloo,mpi");
  EXPECT_EQ(choice("cpu:gloo,cuda:nccl"), "gloo,nccl");
  EXPECT_EQ(choice("cuda:nccl,cpu:mpi"), "mpi,nccl");
}

TEST(Choice, RefusesWhatThereIsNot) {
  for (const char* text : {"", "smoke", "cpu:nccl", "tpu:mpi", "mpi,", "cpu:mpi;cuda:nccl", "auto,nccl"}) try {
      choose(text);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage) << text;
    }
}

TEST(Choice, IsWhatWasChosenOnGpusToo) {
  const auto moves_gpus = [](std::string_view text, bool has_nccl) { return choose(on_gpus(text, has_nccl)).cuda; };
  for (const bool has_nccl : {false, true}) {
    EXPECT_EQ(moves_gpus("mpi", has_nccl), "mpi");
    EXPECT_EQ(moves_gpus("gloo", has_nccl), "gloo");
    EXPECT_EQ(moves_gpus("cpu:gloo,cuda:mpi", has_nccl), "mpi");
    EXPECT_EQ(moves_gpus("cuda:gloo", has_nccl), "gloo");
    EXPECT_EQ(moves_gpus("nccl", has_nccl), "nccl") << "an error, where this build has none";
    EXPECT_EQ(moves_gpus("auto", has_nccl), has_nccl ? "nccl" : "mpi");
    EXPECT_EQ(moves_gpus("cpu:gloo", has_nccl), has_nccl ? "nccl" : "mpi");
    EXPECT_EQ(choose(on_gpus("cpu:gloo", has_nccl)).cpu, "gloo");
  }
  EXPECT_THROW(choose(on_gpus("smoke", true)), Error);
}

TEST(Choice, KnowsWhatThisBuildHas) {
  EXPECT_TRUE(has_backend("mpi"));
  EXPECT_EQ(has_backend("gloo"), has_gloo());
  EXPECT_EQ(has_backend("nccl"), has_nccl());
  EXPECT_FALSE(has_backend("smoke"));
}

Bytes bytes(const std::string& text) { return {text.begin(), text.end()}; }

TEST(Table, AnswersAsC10dsStoresDo) {
  using Verb = Question::Verb;
  std::map<std::string, Bytes> table;
  EXPECT_EQ(answer(table, {Verb::get, "a"}), std::nullopt);
  EXPECT_EQ(answer(table, {Verb::set, "a", bytes("1")}), bytes("1"));
  EXPECT_EQ(answer(table, {Verb::set, "empty", {}}), Bytes());
  EXPECT_EQ(answer(table, {Verb::get, "a"}), bytes("1"));
  EXPECT_EQ(answer(table, {Verb::get, "empty"}), Bytes());
  EXPECT_EQ(answer(table, {Verb::count}), bytes("2"));

  EXPECT_EQ(answer(table, {Verb::add, "n", bytes("5")}), bytes("5"));
  EXPECT_EQ(answer(table, {Verb::add, "n", bytes("-12")}), bytes("-7"));
  EXPECT_EQ(answer(table, {Verb::add, "a", bytes("1")}), bytes("2")) << "a number in decimal counts on";

  EXPECT_EQ(answer(table, {Verb::compare_set, "c", bytes("new"), bytes("old")}), bytes("old")) << "nothing is set";
  EXPECT_EQ(answer(table, {Verb::get, "c"}), std::nullopt);
  EXPECT_EQ(answer(table, {Verb::compare_set, "c", bytes("first"), {}}), bytes("first"));
  EXPECT_EQ(answer(table, {Verb::compare_set, "c", bytes("second"), {}}), bytes("first"));
  EXPECT_EQ(answer(table, {Verb::compare_set, "c", bytes("second"), bytes("first")}), bytes("second"));

  EXPECT_TRUE(answer(table, {Verb::erase, "c"}).has_value());
  EXPECT_FALSE(answer(table, {Verb::erase, "c"}).has_value());
  EXPECT_EQ(answer(table, {Verb::get, "c"}), std::nullopt);
}

}  // namespace
}  // namespace muster::detail::group::backends_test
