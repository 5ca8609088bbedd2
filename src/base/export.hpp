// What the shared libraries export to each other.
#pragma once

/// Marks an internal class or function that another of muster's libraries uses; programs cannot rely on it.
#define MUSTER_INTERNAL_API __attribute__((visibility("default")))
