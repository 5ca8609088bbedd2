// Pre-trains a transformer on the characters of Shakespeare's sonnets, then fine-tunes it to tell his lines from lines
// with shuffled words.
//
//   mpirun -n 2 char_transformer --name sonnets                # pre-trains, and generates some lines
//   mpirun -n 2 char_transformer --classify --from runs/sonnets/checkpoint_* --name order
//   mpirun -n 2 char_transformer --classify --name order0      # without pre-training, to compare
#include "models/data.hpp"

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <muster/muster.hpp>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace nn = torch::nn;

constexpr std::int64_t context = 64, characters = 128;  // characters are ASCII; 0 pads short lines

/// A layer of GPT-2 (Radford et al. 2019): causal attention, then a perceptron, each with a residual connection.
class Block : public nn::Module {
 public:
  Block(std::int64_t width, std::int64_t heads)
      : norm1(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})))),
        qkv(register_module("qkv", nn::Linear(width, 3 * width))),
        out(register_module("out", nn::Linear(width, width))),
        norm2(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})))),
        perceptron(register_module(
            "perceptron", nn::Sequential(nn::Linear(width, 4 * width), nn::GELU(), nn::Linear(4 * width, width)))),
        heads(heads) {}

  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = x + attention(norm1(x));
    return y + perceptron->forward(norm2(y));
  }

 private:
  torch::Tensor attention(const torch::Tensor& x) {
    const auto parts = qkv(x).view({x.size(0), x.size(1), 3, heads, -1}).permute({2, 0, 3, 1, 4});
    const auto y = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    return out(y.transpose(1, 2).reshape_as(x));
  }

  nn::LayerNorm norm1;
  nn::Linear qkv, out;
  nn::LayerNorm norm2;
  nn::Sequential perceptron;
  std::int64_t heads;
};

/// Turns characters [N, length] into features [N, length, width]. A feature depends on its character and those before.
class BodyImpl : public nn::Module {
 public:
  BodyImpl(std::int64_t width, std::int64_t layers, std::int64_t heads)
      : letters(register_module("letters", nn::Embedding(characters, width))),
        places(register_module("places", nn::Embedding(context, width))),
        blocks(register_module("blocks", nn::Sequential())),
        norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})))) {
    for (std::int64_t i = 0; i < layers; ++i) blocks->push_back(Block(width, heads));
  }
  torch::Tensor forward(const torch::Tensor& text) {
    const auto place = torch::arange(text.size(1), text.options());
    return norm(blocks->forward(letters(text) + places(place)));
  }

 private:
  nn::Embedding letters, places;
  nn::Sequential blocks;
  nn::LayerNorm norm;
};
TORCH_MODULE(Body);

/// The body with a head: in pre-training for the next character, in fine-tuning for two classes.
class Model : public nn::Module {
 public:
  Model(const muster::Config& config, std::int64_t classes)
      : body(register_module("body", Body(config.at("width"), config.at("layers"), config.at("heads")))),
        head(register_module("head", nn::Linear(config.at("width").get<std::int64_t>(), classes))) {}

  /// [N, length] to [N, length, characters]: for each position, the logits of the next character.
  torch::Tensor next(const torch::Tensor& text) { return head(body(text)); }
  /// [N, context] to [N, classes]: the logits of each line's class, from the features at its last character.
  torch::Tensor classify(const torch::Tensor& lines) {
    const auto last = lines.ne(0).sum(1).sub(1).view({-1, 1, 1});
    const auto known = body(lines);
    return head(known.gather(1, last.expand({-1, 1, known.size(2)})).squeeze(1));
  }

  Body body;
  nn::Linear head;
};

torch::Tensor as_tensor(const std::string& text) {
  return torch::tensor(std::vector<std::uint8_t>(text.begin(), text.end()), torch::kUInt8);
}

/// Cuts the text into pieces that begin every half context. Each is one character longer than the context.
muster::Dataset pieces(const std::string& text) {
  return muster::Dataset::from_tensors({{"text", as_tensor(text).unfold(0, context + 1, context / 2).contiguous()}});
}

/// Returns the line with its words in random order. It still begins with a capital and ends with the same punctuation.
std::string shuffled(std::string line, std::mt19937& random) {
  std::string mark;
  while (!line.empty() && std::ispunct(line.back()) != 0) {
    mark.insert(0, 1, line.back());
    line.pop_back();
  }
  // "I" and "O" keep their capitals everywhere.
  if (const auto first = line.substr(0, line.find_first_of(" ,!")); first != "I" && first != "O")
    line[0] = static_cast<char>(std::tolower(line[0]));
  std::istringstream stream(line);
  std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
  // std::shuffle would give different results with different libraries.
  for (auto i = words.size(); i > 1; --i) std::swap(words[i - 1], words[random() % i]);
  line.clear();
  for (const auto& word : words) line += (line.empty() ? "" : " ") + word;
  line[0] = static_cast<char>(std::toupper(line[0]));
  return line + mark;
}

/// Returns each line of the text twice: unchanged with label 1, and shuffled with label 0. The same on all ranks.
muster::Dataset lines(const std::string& text) {
  std::mt19937 random(1609);
  std::vector<torch::Tensor> rows;
  std::vector<std::int64_t> labels;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    line.erase(line.find_last_not_of(' ') + 1);
    if (line.empty()) continue;
    for (const std::int64_t label : {1, 0}) {
      auto row = torch::zeros({context}, torch::kUInt8);
      const auto written = as_tensor((label == 1 ? line : shuffled(line, random)).substr(0, context));
      row.narrow(0, 0, written.size(0)).copy_(written);
      rows.push_back(row);
      labels.push_back(label);
    }
  }
  return muster::Dataset::from_tensors({{"line", torch::stack(rows)}, {"label", torch::tensor(labels)}});
}

/// Continues the text character by character; each is drawn by the model's logits at temperature 0.7.
std::string write(Model& model, std::string text, int length) {
  for (int i = 0; i < length; ++i) {
    const auto seen = text.substr(text.size() - std::min<std::size_t>(text.size(), context));
    const auto logits = model.next(as_tensor(seen).to(torch::kLong).unsqueeze(0))[0][-1];
    text += static_cast<char>(torch::multinomial((logits / 0.7).softmax(0), 1).item<std::int64_t>());
  }
  return text;
}

// 1. Pre-training: predict the next character.
void pretrain(muster::Session& session, const muster::Config& config) {
  auto model = session.prepare_model(std::make_shared<Model>(config, characters));
  auto optimizer = session.prepare_optimizer(torch::optim::AdamW(model->parameters(), config.at("lr").get<double>()),
                                             {.max_grad_norm = 1.0});
  muster::Mean loss;
  // Body and head are saved under separate names: fine-tuning loads only the body.
  auto state = session.state({{"body", model->body}, {"head", model->head}, {"optimizer", optimizer}, {"loss", loss}});
  state.restore();

  const auto loss_of = [&](const muster::Batch& batch) {
    const auto text = batch["text"].to(torch::kLong);
    const auto logits = model->next(text.narrow(1, 0, context));
    return torch::cross_entropy_loss(logits.flatten(0, 1), text.narrow(1, 1, context).flatten());
  };
  auto train_shard = session.get_dataset_shard("train");
  auto test_shard = session.get_dataset_shard("test");
  for ([[maybe_unused]] auto epoch : session.epochs(config.at("epochs"))) {
    muster::Mean val_loss;
    for (auto& batch : train_shard.iter_torch_batches({.batch_size = config.at("batch_size"), .shuffle = true})) {
      optimizer.zero_grad();
      const auto l = loss_of(batch);
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
    }
    {
      const auto evaluation = session.evaluation(model);
      for (auto& batch : test_shard.iter_torch_batches()) val_loss.add(loss_of(batch), batch.size());
    }
    session.report({{"loss", loss.take()}, {"val_loss", val_loss}}, state);
  }

  const auto evaluation = session.evaluation(model);
  if (session.world_rank() == 0) std::cout << write(*model, "Shall I compare thee", 300) << std::endl;
}

// 2. Fine-tuning: are this line's words in Shakespeare's order?
void classify(muster::Session& session, const muster::Config& config) {
  auto model = std::make_shared<Model>(config, 2);
  // Load the pre-trained weights before prepare_model(). The head is new, since it has another task.
  const auto from = config.at("from").get<std::string>();
  if (!from.empty()) muster::Checkpoint::from_directory(from).load("body", model->body);
  session.prepare_model(model);
  auto optimizer = session.prepare_optimizer(torch::optim::AdamW(model->parameters(), config.at("lr").get<double>()),
                                             {.max_grad_norm = 1.0});
  muster::Mean loss;
  auto state = session.state({{"model", model}, {"optimizer", optimizer}, {"loss", loss}});
  state.restore();

  auto train_shard = session.get_dataset_shard("train");
  auto test_shard = session.get_dataset_shard("test");
  for ([[maybe_unused]] auto epoch : session.epochs(config.at("epochs"))) {
    muster::Mean val_accuracy;
    for (auto& batch : train_shard.iter_torch_batches({.batch_size = config.at("batch_size"), .shuffle = true})) {
      optimizer.zero_grad();
      const auto l = torch::cross_entropy_loss(model->classify(batch["line"].to(torch::kLong)), batch["label"]);
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
    }
    {
      const auto evaluation = session.evaluation(model);
      for (auto& batch : test_shard.iter_torch_batches()) {
        const auto predicted = model->classify(batch["line"].to(torch::kLong)).argmax(1);
        val_accuracy.add(predicted.eq(batch["label"]).to(torch::kFloat).mean(), batch.size());
      }
    }
    session.report({{"loss", loss.take()}, {"val_accuracy", val_accuracy}}, state);
  }
}

/// Returns about the first nine tenths of the text, up to the end of a sonnet, and the rest.
std::pair<std::string, std::string> read_sonnets() {
  std::ifstream file(example::data("char_transformer", "sonnets.txt"));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto cut = text.find("\n\n", text.size() * 9 / 10) + 2;
  return {text.substr(0, cut), text.substr(cut)};
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  bool classifies = false;
  std::string from;
  std::optional<int> epochs;
  launch.app().description("A transformer on the characters of Shakespeare's sonnets: pre-trained, then fine-tuned.");
  auto* flag = launch.app().add_flag("--classify", classifies, "Fine-tune; from random weights unless --from is given");
  launch.app().add_option("--from", from, "The checkpoint of a pre-trained model")->needs(flag);
  launch.app().add_option("--epochs", epochs, "Passes over the training set; default: 12, to fine-tune 10");
  return launch.run([&] {
    const auto [train_text, test_text] = read_sonnets();
    const auto dataset = [&](const std::string& text) { return classifies ? lines(text) : pieces(text); };
    return muster::TorchTrainer(launch, classifies ? classify : pretrain,
                                {
                                    .train_loop_config = {{"width", 128},
                                                          {"layers", 4},
                                                          {"heads", 4},
                                                          {"batch_size", 32},
                                                          {"lr", classifies ? 3e-4 : 1e-3},
                                                          {"epochs", epochs.value_or(classifies ? 10 : 12)},
                                                          {"from", from}},
                                    .dataset_config = {.split_all = true},
                                    .run_config = {.checkpoint_config = {.num_to_keep = 1}},
                                    .datasets = {{"train", dataset(train_text)}, {"test", dataset(test_text)}},
                                })
        .fit();
  });
}
