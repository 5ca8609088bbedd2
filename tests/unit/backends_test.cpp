// The choice of backends, and the store by which they find each other.
#include "group/backends.hpp"
#include "group/mpi_store.hpp"
#include "muster/error.hpp"
#include "muster/process_group.hpp"

#include <gtest/gtest.h>

namespace muster::detail::group::backends_test {
namespace {

TEST(BackendChoice, IsReadFromItsName) {
  const auto choice = [](std::string_view text) {
    const auto made = parse_backends(text);
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

TEST(BackendChoice, RefusesWhatThereIsNot) {
  for (const char* text : {"", "smoke", "cpu:nccl", "tpu:mpi", "mpi,", "cpu:mpi;cuda:nccl", "auto,nccl",
                           "cpu:gloo,cpu:mpi", "mpi,gloo", "cuda:mpi,mpi", "gloo,cuda:nccl"})
    try {
      parse_backends(text);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage) << text;
    }
}

TEST(BackendChoice, IsWhatWasChosenOnGpusToo) {
  const auto moves_gpus = [](std::string_view text, bool has_nccl) {
    return parse_backends(backends_for_gpus(text, has_nccl)).cuda;
  };
  for (const bool has_nccl : {false, true}) {
    EXPECT_EQ(moves_gpus("mpi", has_nccl), "mpi");
    EXPECT_EQ(moves_gpus("gloo", has_nccl), "gloo");
    EXPECT_EQ(moves_gpus("cpu:gloo,cuda:mpi", has_nccl), "mpi");
    EXPECT_EQ(moves_gpus("cuda:gloo", has_nccl), "gloo");
    EXPECT_EQ(moves_gpus("nccl", has_nccl), "nccl") << "an error, where this build has none";
    EXPECT_EQ(moves_gpus("auto", has_nccl), has_nccl ? "nccl" : "mpi");
    EXPECT_EQ(moves_gpus("cpu:gloo", has_nccl), has_nccl ? "nccl" : "mpi");
    EXPECT_EQ(parse_backends(backends_for_gpus("cpu:gloo", has_nccl)).cpu, "gloo");
  }
  EXPECT_THROW(parse_backends(backends_for_gpus("smoke", true)), Error);
}

TEST(BackendChoice, KnowsWhatThisBuildHas) {
  EXPECT_TRUE(has_backend("mpi"));
  EXPECT_EQ(has_backend("gloo"), has_gloo());
  EXPECT_EQ(has_backend("nccl"), has_nccl());
  EXPECT_FALSE(has_backend("smoke"));
}

Bytes bytes(const std::string& text) { return {text.begin(), text.end()}; }

TEST(Table, AnswersAsC10dsStoresDo) {
  using Kind = StoreRequest::Kind;
  std::map<std::string, Bytes> table;
  EXPECT_EQ(handle(table, {Kind::get, "a"}), std::nullopt);
  EXPECT_EQ(handle(table, {Kind::set, "a", bytes("1")}), bytes("1"));
  EXPECT_EQ(handle(table, {Kind::set, "empty", {}}), Bytes());
  EXPECT_EQ(handle(table, {Kind::get, "a"}), bytes("1"));
  EXPECT_EQ(handle(table, {Kind::get, "empty"}), Bytes());
  EXPECT_EQ(handle(table, {Kind::count}), bytes("2"));

  EXPECT_EQ(handle(table, {Kind::add, "n", bytes("5")}), bytes("5"));
  EXPECT_EQ(handle(table, {Kind::add, "n", bytes("-12")}), bytes("-7"));
  EXPECT_EQ(handle(table, {Kind::add, "a", bytes("1")}), bytes("2")) << "a number in decimal counts on";

  EXPECT_EQ(handle(table, {Kind::compare_set, "c", bytes("new"), bytes("old")}), bytes("old")) << "nothing is set";
  EXPECT_EQ(handle(table, {Kind::get, "c"}), std::nullopt);
  EXPECT_EQ(handle(table, {Kind::compare_set, "c", bytes("first"), {}}), bytes("first"));
  EXPECT_EQ(handle(table, {Kind::compare_set, "c", bytes("second"), {}}), bytes("first"));
  EXPECT_EQ(handle(table, {Kind::compare_set, "c", bytes("second"), bytes("first")}), bytes("second"));

  EXPECT_TRUE(handle(table, {Kind::erase, "c"}).has_value());
  EXPECT_FALSE(handle(table, {Kind::erase, "c"}).has_value());
  EXPECT_EQ(handle(table, {Kind::get, "c"}), std::nullopt);
}

}  // namespace
}  // namespace muster::detail::group::backends_test
