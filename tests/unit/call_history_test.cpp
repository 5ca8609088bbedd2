#include "operators/call_history.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::operators::call_history_test {
namespace {

/// Makes the calls again, as a resumed main does.
void expect_saved(CallHistory history, const std::vector<CallRecord>& expected) {
  for (const auto& one : expected) {
    const auto* const saved = history.next();
    ASSERT_NE(saved, nullptr);
    EXPECT_EQ(saved->call, one.call);
    EXPECT_EQ(saved->result, one.result);
    EXPECT_EQ(saved->registers_data, one.registers_data);
    ASSERT_EQ(saved->refusal.has_value(), one.refusal.has_value());
    if (one.refusal) {
      EXPECT_EQ(saved->refusal->code(), one.refusal->code());
      EXPECT_STREQ(saved->refusal->what(), one.refusal->what());
    }
    history.advance();
  }
  EXPECT_EQ(history.next(), nullptr);
}

TEST(CallHistory, ComeBackFromTextAndFromBytes) {
  CallHistory calls;
  std::vector<CallRecord> expected;
  std::int64_t capacity = 0, grown = 0;
  for (int i = 0; i < 500; ++i) {
    CallRecord call{.call = Call::train, .result = {{"loss", 0.1 * i}, {"text", "a\nb\\u00e9\0c"}}};
    if (i % 3 == 1) call = {.call = Call::apply_all_operators, .result = {1, nullptr}, .registers_data = true};
    if (i % 3 == 2) call = {.call = Call::load, .refusal = Error(ExitCode::data, "loading\nit: is not there")};
    calls.add(call);
    calls.add({.call = Call::step});  // is left out, since main has not gone on
    calls.advance();
    expected.push_back(std::move(call));
    const auto now = calls.bytes().numel();
    EXPECT_TRUE(std::has_single_bit(static_cast<std::uint64_t>(now)));
    grown += std::exchange(capacity, now) != now ? 1 : 0;
    if (i % 100 != 0) continue;
    CallHistory from_text, from_bytes;
    from_text.restore(calls.text());
    expect_saved(from_text, expected);
    from_bytes.restore(calls.bytes());
    expect_saved(from_bytes, expected);
    EXPECT_EQ(from_bytes.text(), calls.text());
  }
  EXPECT_LT(grown, 8) << "most calls leave the layout of a checkpoint as it was";
}

TEST(CallHistory, ThatAreNoneAreDamage) {
  CallHistory calls;
  EXPECT_TRUE(calls.empty());
  EXPECT_EQ(calls.text(), "");
  for (const char* const text : {"{}\n", "[1]\n", "train\n", R"({"name": 1, "result": 2})", R"({"name": "train"})",
                                 R"({"name": "a", "result": 2})"}) {
    try {
      calls.restore(std::string(text));
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::data) << text;
    }
  }
}

}  // namespace
}  // namespace muster::detail::operators::call_history_test
