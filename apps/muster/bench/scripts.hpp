// The texts of torch_job.py and ray_job.py, which are compiled into muster-bench.
#pragma once

namespace muster::bench {

extern const char* const torch_job;
extern const char* const ray_job;

}  // namespace muster::bench
