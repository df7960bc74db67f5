// States of conversations in Python: looking at them, saving them, bringing them back.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "runtime/model.h"
#include "state/restore.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lily {
namespace {

using View = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>;
using Given = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A read-only array on memory that stays as it is while `owner` is held.
template <typename T>
View make_view(std::shared_ptr<const T> owner, const std::byte* data, size_t size) {
    auto* held = new std::shared_ptr<const T>(std::move(owner));
    const nb::capsule capsule(held,
                              [](void* p) noexcept { delete static_cast<std::shared_ptr<const T>*>(p); });
    return View(reinterpret_cast<const uint8_t*>(data), {size}, capsule);
}

Bytes bytes_of(const Given& array) {
    return {reinterpret_cast<const std::byte*>(array.data()), array.size()};
}

}  // namespace

void bind_state(nb::module_& m) {
    nb::class_<Prefix>(m, "Prefix",
                       "An immutable beginning of a conversation, for sequences to continue from.")
        .def_prop_ro("length", &Prefix::length)
        .def_prop_ro("tokens", &Prefix::tokens)
        .def("blocks", &Prefix::blocks)
        .def("pages",
             [](const Prefix& self) {
                 std::vector<View> views;
                 for (const std::shared_ptr<const KvPage>& page : self.kv().shared_pages()) {
                     views.push_back(make_view(page, page->data(), page->size()));
                 }
                 return views;
             })
        .def("recurrent", [](const Prefix& self) {
            const auto bytes = self.recurrent()->bytes();
            return make_view(self.recurrent(), bytes.data(), bytes.size());
        });

    nb::class_<Sequence>(m, "Sequence", "The state of one conversation; covers exactly `tokens`.")
        .def_prop_ro("length", &Sequence::length)
        .def_prop_ro("tokens", &Sequence::tokens)
        .def_prop_ro("nbytes", &Sequence::bytes)
        .def("fork", &Sequence::fork, nb::call_guard<nb::gil_scoped_release>())
        .def("snapshot", &Sequence::snapshot, nb::call_guard<nb::gil_scoped_release>())
        .def("truncate", &Sequence::truncate, "length"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("snapshots", &Sequence::snapshots)
        .def("prefix", &Sequence::prefix, "length"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("blocks", &Sequence::blocks)
        .def("drop_snapshot", &Sequence::drop_snapshot, "length"_a)
        .def("recurrent_state",
             [](Sequence& self, int64_t layer) {
                 self.settle();
                 const RecurrentLayout& layout = self.recurrent().layout();
                 if (layer < 0 || layer >= layout.layers) throw InvalidArgument("no such recurrent layer");
                 return make_array(self.recurrent().read_matrices(layer),
                                   {static_cast<size_t>(layout.heads), static_cast<size_t>(layout.key_dim),
                                    static_cast<size_t>(layout.value_dim)});
             })
        .def("conv_state",
             [](Sequence& self, int64_t layer) {
                 self.settle();
                 const RecurrentLayout& layout = self.recurrent().layout();
                 if (layer < 0 || layer >= layout.layers) throw InvalidArgument("no such recurrent layer");
                 return make_array(self.recurrent().read_conv(layer, self.length()),
                                   {static_cast<size_t>(layout.taps), static_cast<size_t>(layout.channels)});
             })
        .def("keys_values", [](Sequence& self, int64_t layer) {
            self.settle();
            const KvLayout& layout = self.kv().layout();
            if (layer < 0 || layer >= layout.layers) throw InvalidArgument("no such attention layer");
            auto [keys, values] = self.kv().read(layer, self.length());
            const std::vector<size_t> shape = {static_cast<size_t>(self.length()),
                                               static_cast<size_t>(layout.kv_heads),
                                               static_cast<size_t>(layout.head_dim)};
            return std::make_pair(make_array(std::move(keys), shape), make_array(std::move(values), shape));
        });
}

void bind_restore(nb::module_& m) {
    m.def(
        "restore_prefix",
        [](const Model& model, const Ids& tokens, const std::vector<Given>& pages, const Given& recurrent) {
            std::vector<Bytes> pieces;
            for (const Given& page : pages) pieces.push_back(bytes_of(page));
            const int64_t vocabulary = model.config().vocab_size;
            for (size_t i = 0; i < tokens.size(); ++i) {
                if (tokens.data()[i] < 0 || tokens.data()[i] >= vocabulary) {
                    throw InvalidArgument("a saved state holds a token outside the vocabulary");
                }
            }
            const nb::gil_scoped_release release;
            return restore_prefix(model.state_layout(), {tokens.data(), tokens.data() + tokens.size()},
                                  pieces, bytes_of(recurrent));
        },
        "model"_a, "tokens"_a, "pages"_a, "recurrent"_a);
    m.def(
        "restore_sequence",
        [](const Prefix& prefix, const std::vector<std::pair<int64_t, Given>>& earlier) {
            std::vector<std::pair<int64_t, Bytes>> pieces;
            for (const auto& [length, bytes] : earlier) pieces.emplace_back(length, bytes_of(bytes));
            const nb::gil_scoped_release release;
            return restore_sequence(prefix, pieces);
        },
        "prefix"_a, "earlier"_a);
}

}  // namespace lily
