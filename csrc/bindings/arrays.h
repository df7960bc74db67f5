// Arrays handed to Python and taken from it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace lily {

using Ids = nanobind::ndarray<const int32_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// An fp32 array that owns its memory.
inline nanobind::ndarray<nanobind::numpy, float> make_array(std::vector<float>&& values,
                                                            const std::vector<size_t>& shape) {
    auto* owned = new std::vector<float>(std::move(values));
    const nanobind::capsule owner(owned,
                                  [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
    return nanobind::ndarray<nanobind::numpy, float>(owned->data(), shape.size(), shape.data(), owner);
}

}  // namespace lily
