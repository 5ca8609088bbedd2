// All public headers, except those that not every program wants:
//   mpi.hpp             needs MPI's header
//   data_loader.hpp     needs all of torch/data
//   exported.hpp        needs torch's modules
//   script.hpp          needs torch's modules
//   sync_batch_norm.hpp needs torch's modules
//   reduce_op.hpp       comes with communicator.hpp
//   supervise.hpp       is for programs that start others
//   live.hpp            is for training from a running simulation
//   doctor.hpp          is for tools that look at a machine
#pragma once

#include <muster/augmentation.hpp>
#include <muster/callback.hpp>
#include <muster/callbacks.hpp>
#include <muster/checkpoint.hpp>
#include <muster/classification.hpp>
#include <muster/comm_hooks.hpp>
#include <muster/communicator.hpp>
#include <muster/config.hpp>
#include <muster/convert.hpp>
#include <muster/data_parallel.hpp>
#include <muster/dataset.hpp>
#include <muster/ema.hpp>
#include <muster/error.hpp>
#include <muster/json.hpp>
#include <muster/launch.hpp>
#include <muster/metrics.hpp>
#include <muster/mixed_precision.hpp>
#include <muster/model.hpp>
#include <muster/operator.hpp>
#include <muster/optimizer.hpp>
#include <muster/predictor.hpp>
#include <muster/preprocessor.hpp>
#include <muster/process_group.hpp>
#include <muster/recompute.hpp>
#include <muster/reproducibility.hpp>
#include <muster/result.hpp>
#include <muster/schedulers.hpp>
#include <muster/session.hpp>
#include <muster/state.hpp>
#include <muster/sweep.hpp>
#include <muster/trainer.hpp>
#include <muster/validation.hpp>
#include <muster/version.hpp>
#include <muster/weights.hpp>
