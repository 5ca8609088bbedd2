// The datasets of a session: split among the workers, preprocessed, iterated over.
#pragma once

#include "data/passes/cursors.hpp"
#include "data/passes/shard.hpp"
#include "muster/config.hpp"
#include "muster/preprocessor.hpp"
#include "train/workers.hpp"

#include <map>
#include <memory>
#include <string>

namespace muster::detail::train {

struct SessionData {
  std::map<std::string, Dataset> datasets;
  DataConfig config;
  PreprocessorPtr preprocessor;  ///< may be null
  std::shared_ptr<data::Cursors> cursors;
  std::map<std::string, std::shared_ptr<data::ShardState>> shards = {};

  /// The shard of that name, made at its first use.
  std::shared_ptr<data::ShardState> shard(const std::string& name, const Workers& workers);
  /// Fits the preprocessor unless it is, or loads what a checkpoint has of it (null: nothing), and lays it over all
  /// datasets. Collective.
  void preprocess(const Json& saved, const Communicator& control);
};

}  // namespace muster::detail::train
