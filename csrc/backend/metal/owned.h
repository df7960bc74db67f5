// Owned references to Objective-C objects, without the rest of metal-cpp's headers.
#pragma once

#include <type_traits>  // that the next one needs

#include <Foundation/NSSharedPtr.hpp>

namespace lily::metal {

template <typename T>
using Owned = NS::SharedPtr<T>;

}  // namespace lily::metal
