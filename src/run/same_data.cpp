#include "run/same_data.hpp"

#include "base/json.hpp"
#include "base/text.hpp"
#include "muster/error.hpp"
#include "muster/json.hpp"

namespace muster::detail::run {

void require_same_data(const Communicator& world, int workers,
                       const std::map<std::string, data::DatasetFingerprint>& mine) {
  Json prints = Json::object();
  for (const auto& [name, print] : mine) prints[name] = print.to_json();
  const auto of_rank = world.all_gather(json_text_lossy(prints));
  const auto where = [&](std::size_t rank) { return str("rank ", rank, " (", world.topology().hosts[rank], ")"); };
  const auto refuse = [](const std::string& name, const std::string& fact) {
    throw Error(
        ExitCode::data, "comparing the dataset \"" + name + "\" over the ranks", fact,
        "Copy the same files to every host, or make the same tensors on every rank, with the same DatasetOptions");
  };
  const auto first = json_from_text(of_rank.front());
  for (std::size_t rank = 1; rank < static_cast<std::size_t>(workers); ++rank) {
    if (of_rank[rank] == of_rank.front()) continue;
    const auto other = json_from_text(of_rank[rank]);
    for (const auto& [name, print] : first.items()) {
      if (!other.contains(name)) refuse(name, where(rank) + " has none of that name, and " + where(0) + " has");
      if (const auto fact = data::difference(data::DatasetFingerprint::from_json(print), where(0),
                                             data::DatasetFingerprint::from_json(other.at(name)), where(rank)))
        refuse(name, *fact);
    }
    for (const auto& [name, print] : other.items())
      if (!first.contains(name)) refuse(name, where(0) + " has none of that name, and " + where(rank) + " has");
  }
}

}  // namespace muster::detail::run
