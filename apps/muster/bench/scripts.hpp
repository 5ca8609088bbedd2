// The Python programs that are compiled into muster-bench: the texts of torch_job.py and ray_job.py.
#pragma once

namespace muster::bench {

extern const char* const torch_job;
extern const char* const ray_job;

}  // namespace muster::bench
