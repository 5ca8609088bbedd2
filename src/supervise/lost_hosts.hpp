// The hosts that a start must not use, and the questions whether they answer again.
#pragma once

#include "supervise/launchers/launchers.hpp"

#include <array>
#include <chrono>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::supervise {

/// The variables by which the user tells a launcher the program to log in to other hosts with.
inline constexpr std::array login_variables{"OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC"};
/// Returns that program with its arguments; ssh if none of the variables is set.
std::vector<std::string> login_program(const Environment& environment);

/// ssh's messages about a host that it cannot reach begin with one of these, followed by the host's name.
inline constexpr std::array<std::string_view, 2> ssh_failures{"ssh: connect to host ",
                                                              "ssh: Could not resolve hostname "};

/// Asks the lost hosts from time to time whether they answer, by logging in to them. The more often a host was lost,
/// the later it is asked.
class LostHosts {
 public:
  using Clock = std::chrono::steady_clock;

  /// `login`: see login_program(). Empty if lost hosts never come back.
  explicit LostHosts(std::vector<std::string> login) : login_(std::move(login)) {}
  LostHosts(const LostHosts&) = delete;
  LostHosts& operator=(const LostHosts&) = delete;
  ~LostHosts() { stop_asking(); }

  const Hosts& hosts() const noexcept { return hosts_; }
  void add(const std::string& host);
  void replace(Hosts hosts) { hosts_ = std::move(hosts); }
  void remove(const Hosts& hosts);

  /// Asks the hosts that are due, and reads the answers. Call it often; it does not wait. Returns the hosts that have
  /// answered.
  Hosts answering();
  static constexpr std::chrono::seconds answer_timeout{6};  ///< longer than ssh's own timeout of 5 s
  /// Asks all lost hosts and `others`, and waits at most for `timeout`. Removes the lost hosts that answer. Returns the
  /// hosts of `others` that cannot be reached, each with ssh's message, or with an empty text if it just does not
  /// answer.
  std::map<std::string, std::string> ask_all(const Hosts& others, std::chrono::seconds timeout = answer_timeout);
  /// Returns the host that has answered with this name; empty if none has. `name`: see short_name().
  std::string host_called(const std::string& name) const;

 private:
  struct Asked {
    std::string host;
    int answer = -1;  ///< reading end of the login program's pipe
    pid_t process = -1;
    std::string text = {};  ///< what was read from it
  };
  void ask(const std::string& host);
  std::vector<Asked> read_answers();
  void stop_asking();

  std::vector<std::string> login_;
  Hosts hosts_;
  std::map<std::string, Clock::time_point> next_question_;
  std::map<std::string, int> times_lost_;
  std::map<std::string, std::string> hosts_by_name_;  ///< by the short name that the host has answered
  std::vector<Asked> asked_;
};

}  // namespace muster::detail::supervise
