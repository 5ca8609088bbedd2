// What the shared libraries export. They are compiled with hidden visibility, so that they export only what is marked.
#pragma once

/// Marks a class or function of the API that is not defined in a header.
#define MUSTER_API __attribute__((visibility("default")))
