#include "session/validation_server.hpp"

#include "base/json.hpp"
#include "comm/agreement.hpp"
#include "comm/rank_status.hpp"
#include "comm/wait.hpp"

#include <chrono>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

namespace muster::detail::session {
namespace {

using namespace std::chrono_literals;
using Decision = Validator::Decision;

/// How often the leader looks for a checkpoint that is still being written.
constexpr auto look_interval = 100ms;

}  // namespace

ValidationServer::ValidationServer(Validator& validator, comm::Mailbox& mailbox, const Communicator& group, int leader)
    : validator_(validator), mailbox_(mailbox), leader_(leader), context_(validator.make_context(group)) {}

void ValidationServer::serve(int attempt) {
  const auto& world = validator_.resolved().world();
  is_ending_ = false;
  const auto is_served = [&] {
    while (const auto text = mailbox_.receive()) handle(json_from_text(*text), attempt);
    if (is_leader()) lead(attempt);
    return is_ending_ && !validator_.is_running();
  };
  comm::wait_until(is_served, Validator::as_long_as_it_takes, [&] { comm::throw_if_alarm_raised(world); });
}

void ValidationServer::handle(const Json& message, int attempt) {
  if (message.contains("validate")) {
    const int index = message.at("validate");
    const std::int64_t iteration = message.at("training_iteration");
    if (const auto known = results_.find(index); known != results_.end())
      mailbox_.send(0, known->second.to_text());
    else if (!current_ || current_->index != index)
      queue_[index] = {index, iteration};
  } else if (message.contains("begin")) {
    // Without this rank the others end by the time-out.
    if (!validator_.is_stuck()) validator_.begin(context_, message.at("begin"));
  } else if (message.contains("leave")) {
    validator_.leave();
    validator_.set_stuck(validator_.is_stuck() || message.at("leave").get<bool>());
  } else if (message.at("end") == attempt) {
    is_ending_ = true;
    // The workers have ended the attempt and now wait for this validation, maybe for longer than the time limit.
    if (validator_.is_running()) validator_.keep_others_waiting();
  }
}

void ValidationServer::send_to_followers(const Json& message) {
  for (int rank = leader_ + 1; rank < validator_.resolved().world().size(); ++rank)
    mailbox_.send(rank, json_text(message));
}

void ValidationServer::lead(int attempt) {
  if (validator_.is_running()) {
    const auto decision = validator_.decide(is_ending_);
    if (decision == Decision::keep_running) return;
    end_job(decision);
    comm::keep_alive(validator_.resolved().world(), 0ms);
  }
  if (is_ending_)
    send_to_followers({{"end", attempt}});
  else
    begin_next();
}

void ValidationServer::end_current() {
  if (is_leader() && validator_.is_running())
    end_job(validator_.is_over() ? Decision::finished : Decision::out_of_time);
}

void ValidationServer::end_job(Decision decision) {
  const auto found = validator_.write_result(*std::exchange(current_, std::nullopt), decision);
  validator_.set_stuck(decision != Decision::finished || validator_.is_out_of_step());
  send_to_followers({{"leave", validator_.is_stuck()}});
  validator_.leave();
  mailbox_.send(0, found.to_text());
  if (!found.fields.is_null()) results_[found.of.index] = found;
}

void ValidationServer::begin_next() {
  using Clock = Validator::Clock;
  if (validator_.is_stuck() || queue_.empty() || Clock::now() - last_look_ < look_interval ||
      !validator_.may_begin(false))
    return;
  last_look_ = Clock::now();
  for (const auto& [index, of] : queue_) {
    if (std::error_code ignored; !std::filesystem::exists(validator_.path_of(index), ignored))
      continue;  // not written yet, or lost
    send_to_followers({{"begin", index}});
    validator_.begin(context_, index);
    current_ = of;
    queue_.erase(index);
    return;
  }
}

}  // namespace muster::detail::session
