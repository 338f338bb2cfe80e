// A reference routing that C++ programs own.
#pragma once

#include <cstdlib>
#include <memory>

#include "reference/routing.h"

namespace ref {

struct FreeRouting {
    void operator()(RefRouting* routing) const { ref_routing_free(routing); }
};
struct FreeHost {
    void operator()(void* memory) const { std::free(memory); }
};

using Routing = std::unique_ptr<RefRouting, FreeRouting>;
using RowNumbers = std::unique_ptr<uint64_t[], FreeHost>;

}  // namespace ref
