#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bench/roofline.h"
#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lily {

void bind_bench(nb::module_& m) {
    nb::module_ module = m.def_submodule("bench", "Measures the limits of this machine.");
    module.def("dot_units", [] {
        std::vector<std::tuple<std::string, std::string, int64_t>> units;
        for (bench::DotUnit& unit : bench::dot_units()) {
            units.emplace_back(std::move(unit.name), std::move(unit.description), unit.operations);
        }
        return units;
    });
    module.def("measure_dot_products", &bench::measure_dot_products, "unit"_a, "threads"_a, "seconds"_a,
               "repeats"_a, nb::call_guard<nb::gil_scoped_release>());
    module.def("measure_read_bandwidth", &bench::measure_read_bandwidth, "bytes"_a, "threads"_a, "seconds"_a,
               "repeats"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace lily
