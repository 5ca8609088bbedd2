// The texts of the files of a new project. %NAME% stands for its name, %HINTS% for the place where find_package()
// looks.
#pragma once

namespace muster::tool {

extern const char* const cmake_template;
extern const char* const program_template;
extern const char* const batch_template;
extern const char* const readme_template;
extern const char* const ci_template;
extern const char* const gitignore_template;

}  // namespace muster::tool
