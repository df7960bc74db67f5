// The Python face of the extension: conversions only.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "base/error.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "runtime/model.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lily {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using LocationTuple = std::tuple<int, int64_t, int64_t, std::string, std::vector<int64_t>>;

TensorLocation location(const LocationTuple& t) {
    return {std::get<0>(t), std::get<1>(t), std::get<2>(t), parse_dtype(std::get<3>(t)), std::get<4>(t)};
}

Format parse_format(const std::string& mode) {
    if (mode == "affine") return Format::affine;
    if (mode == "mxfp4") return Format::mxfp4;
    if (mode == "mxfp8") return Format::mxfp8;
    if (mode == "nvfp4") return Format::nvfp4;
    throw CheckpointError("unsupported quantisation mode " + mode);
}

ModelConfig parse_config(const nb::dict& d) {
    const auto integer = [&](const char* key) { return nb::cast<int64_t>(d[key]); };
    ModelConfig c;
    c.vocab_size = integer("vocab_size");
    c.hidden_size = integer("hidden_size");
    c.num_hidden_layers = integer("num_hidden_layers");
    for (const auto& type : nb::cast<std::vector<std::string>>(d["layer_types"])) {
        c.full_attention.push_back(type == "full_attention");
    }
    c.num_attention_heads = integer("num_attention_heads");
    c.num_key_value_heads = integer("num_key_value_heads");
    c.head_dim = integer("head_dim");
    c.rotary_dim = integer("rotary_dim");
    c.rope_theta = nb::cast<double>(d["rope_theta"]);
    c.linear_num_key_heads = integer("linear_num_key_heads");
    c.linear_num_value_heads = integer("linear_num_value_heads");
    c.linear_key_head_dim = integer("linear_key_head_dim");
    c.linear_value_head_dim = integer("linear_value_head_dim");
    c.linear_conv_kernel_dim = integer("linear_conv_kernel_dim");
    c.num_experts = integer("num_experts");
    c.num_experts_per_tok = integer("num_experts_per_tok");
    c.moe_intermediate_size = integer("moe_intermediate_size");
    c.shared_expert_intermediate_size = integer("shared_expert_intermediate_size");
    c.intermediate_size = integer("intermediate_size");
    c.mlp_only_layers = nb::cast<std::vector<int64_t>>(d["mlp_only_layers"]);
    c.norm_topk_prob = nb::cast<bool>(d["norm_topk_prob"]);
    c.rms_norm_eps = nb::cast<double>(d["rms_norm_eps"]);
    c.tie_word_embeddings = nb::cast<bool>(d["tie_word_embeddings"]);
    c.max_position_embeddings = integer("max_position_embeddings");
    c.mtp_num_hidden_layers = integer("mtp_num_hidden_layers");
    c.norm_shift = nb::cast<bool>(d["norm_shift"]);
    c.mtp_norm_shift = nb::cast<bool>(d["mtp_norm_shift"]);
    return c;
}

std::unique_ptr<Model> make_model(const nb::dict& config, std::shared_ptr<WeightStore> weights,
                                  const std::string& backend, int threads, const std::string& kv_dtype,
                                  const std::set<std::string>& ablate, std::optional<int64_t> chunk,
                                  uint64_t memory_limit, int64_t context) {
    ModelOptions options;
    options.backend = backend;
    options.backend_options = {threads, ablate, memory_limit, context};
    if (kv_dtype != "bfloat16" && kv_dtype != "float32" && kv_dtype != "int8") {
        throw InvalidArgument("kv_dtype must be 'bfloat16', 'float32' or 'int8', got '" + kv_dtype + "'");
    }
    if (kv_dtype == "int8" && backend != "cpu") {
        throw InvalidArgument("kv_dtype 'int8' works on the CPU backend only, not on '" + backend + "'");
    }
    options.kv_dtype = kv_dtype == "bfloat16"  ? KvDtype::bf16
                       : kv_dtype == "float32" ? KvDtype::f32
                                               : KvDtype::int8;
    options.chunk = chunk;
    const ModelConfig parsed = parse_config(config);
    const nb::gil_scoped_release release;
    return std::make_unique<Model>(parsed, std::move(weights), options);
}

void bind_weights(nb::module_& m) {
    nb::class_<WeightStore>(m, "Weights", "The tensors of a checkpoint, mapped from its files.")
        .def(nb::init<const std::vector<std::string>&>(), "paths"_a)
        .def(
            "add",
            [](WeightStore& self, const std::string& name, const std::string& label,
               const LocationTuple& data) { self.add(name, label, location(data)); },
            "name"_a, "label"_a, "data"_a)
        .def(
            "add_quantized",
            [](WeightStore& self, const std::string& name, const std::string& label,
               const LocationTuple& codes, const LocationTuple& scales,
               const std::optional<LocationTuple>& biases, const std::string& mode, int bits,
               int group_size) {
                std::optional<TensorLocation> bias;
                if (biases) bias = location(*biases);
                self.add_quantized(name, label, location(codes), location(scales), bias,
                                   {parse_format(mode), bits, group_size});
            },
            "name"_a, "label"_a, "codes"_a, "scales"_a, "biases"_a.none(), "mode"_a, "bits"_a, "group_size"_a)
        .def_prop_ro("nbytes", &WeightStore::bytes);
}

void bind_sampler(nb::module_& m) {
    nb::class_<Sampler>(m, "Sampler", "Draws tokens for one request.")
        .def(
            "__init__",
            [](Sampler* self, float temperature, int64_t top_k, float top_p, float min_p,
               float repetition_penalty, float presence_penalty, float frequency_penalty,
               const std::vector<std::pair<int32_t, float>>& logit_bias, uint64_t seed, int64_t vocabulary,
               float xtc_probability, float xtc_threshold) {
                new (self) Sampler({temperature, top_k, top_p, min_p, xtc_probability, xtc_threshold,
                                    repetition_penalty, presence_penalty, frequency_penalty, logit_bias, seed,
                                    vocabulary});
            },
            nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "repetition_penalty"_a,
            "presence_penalty"_a, "frequency_penalty"_a, "logit_bias"_a, "seed"_a, "vocabulary"_a,
            "xtc_probability"_a = 0.0f, "xtc_threshold"_a = 0.1f)
        .def(
            "observe", [](Sampler& self, const Ids& ids) { self.observe({ids.data(), ids.size()}); }, "ids"_a)
        .def(
            "draw",
            [](Sampler& self, const Logits& logits, const std::optional<Logits>& raw) {
                self.ensure_logits(static_cast<int64_t>(logits.size()));
                std::copy(logits.data(), logits.data() + logits.size(), self.logits().begin());
                const nb::gil_scoped_release release;
                return raw ? self.draw({raw->data(), raw->size()}) : self.draw();
            },
            "logits"_a, "raw"_a = nb::none())
        .def(
            "distribution",
            [](Sampler& self,
               const nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>& logits) {
                self.ensure_logits(static_cast<int64_t>(logits.size()));
                std::copy(logits.data(), logits.data() + logits.size(), self.logits().begin());
                std::vector<std::pair<int32_t, float>> result;
                for (const Candidate& c : self.distribution()) result.emplace_back(c.token, c.probability);
                return result;
            },
            "logits"_a)
        .def("keep_log_probabilities", &Sampler::keep_log_probabilities, "keep"_a)
        .def("log_probability", &Sampler::log_probability, "token"_a)
        .def("best", &Sampler::best, "count"_a)
        .def(
            "allow_only",
            [](Sampler& self,
               const nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& mask) {
                std::vector<uint32_t> words((mask.size() + 31) / 32);
                for (size_t i = 0; i < mask.size(); ++i) {
                    words[i / 32] |= static_cast<uint32_t>(mask.data()[i] != 0) << i % 32;
                }
                self.allow_only(words);
            },
            "mask"_a)
        .def(
            "allow_bits",
            [](Sampler& self,
               const nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& words) {
                self.allow_only({words.data(), words.size()});
            },
            "words"_a);
}

// Whether a call should end early: its token says so, or a signal came while its own thread, the main one,
// was computing; what the signal's handler raised is then kept for raise().
class Interruption {
  public:
    explicit Interruption(const CancelToken* token) : token_(token) {}

    bool operator()() {
        if (token_ && token_->cancelled()) return true;
        const auto now = std::chrono::steady_clock::now();
        if (std::this_thread::get_id() != thread_ || now - asked_ < kBetweenSignals) return false;
        asked_ = now;
        const nb::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals() == 0) return false;
        raised_.emplace();
        return true;
    }
    void raise() {
        if (raised_) throw std::move(*raised_);
    }

  private:
    static constexpr std::chrono::milliseconds kBetweenSignals{50};
    const CancelToken* token_;
    std::thread::id thread_ = std::this_thread::get_id();
    std::chrono::steady_clock::time_point asked_ = std::chrono::steady_clock::now();
    std::optional<nb::python_error> raised_;
};

void bind_model(nb::module_& m) {
    nb::class_<CancelToken>(m, "CancelToken", "Stops work in progress, from any thread.")
        .def(nb::init<>())
        .def("cancel", &CancelToken::cancel)
        .def_prop_ro("cancelled", &CancelToken::cancelled);

    nb::class_<Model>(m, "Model", "Weights, graph and backend.")
        .def(nb::new_(&make_model), "config"_a, "weights"_a, nb::kw_only(), "backend"_a, "threads"_a,
             "kv_dtype"_a, "ablate"_a, "chunk"_a = nb::none(), "memory_limit"_a = 0, "context"_a = 0)
        .def(
            "new_sequence",
            [](const Model& self, const Prefix* prefix) {
                return prefix ? std::make_unique<Sequence>(*prefix) : self.new_sequence();
            },
            "prefix"_a = nb::none(), nb::call_guard<nb::gil_scoped_release>())
        .def(
            "forward",
            [](Model& self, Sequence& sequence, const Ids& ids, bool all, const CancelToken* cancel,
               const std::optional<std::function<void(int64_t, int64_t)>>& progress)
                -> std::optional<nb::ndarray<nb::numpy, float>> {
                const size_t rows = all ? ids.size() : 1;
                const auto vocab = static_cast<size_t>(self.config().vocab_size);
                std::vector<float> logits(rows * vocab);
                std::function<void(int64_t, int64_t)> report;
                if (progress) {
                    report = [&](int64_t done, int64_t total) {
                        const nb::gil_scoped_acquire acquire;
                        (*progress)(done, total);
                    };
                }
                int64_t fed = 0;
                Interruption interruption(cancel);
                {
                    const nb::gil_scoped_release release;
                    fed =
                        self.forward(sequence, {ids.data(), ids.size()}, all ? LogitsOf::all : LogitsOf::last,
                                     logits.data(), std::ref(interruption), report);
                }
                interruption.raise();
                if (fed < static_cast<int64_t>(ids.size())) return std::nullopt;
                if (all) return make_array(std::move(logits), {rows, vocab});
                return make_array(std::move(logits), {vocab});
            },
            "sequence"_a, "ids"_a, nb::kw_only(), "all"_a = false, "cancel"_a = nb::none(),
            "progress"_a = nb::none())
        .def("new_head_sequence", &Model::new_head_sequence, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "draft",
            [](Model& self, Sequence& sequence, Sequence& head, const Ids& ids, const Ids& next) {
                const auto vocab = static_cast<size_t>(self.config().vocab_size);
                std::vector<float> logits(next.size() * vocab);
                {
                    const nb::gil_scoped_release release;
                    self.draft(sequence, head, {ids.data(), ids.size()}, {next.data(), next.size()},
                               logits.data());
                }
                return make_array(std::move(logits), {next.size(), vocab});
            },
            "sequence"_a, "head"_a, "ids"_a, "next_ids"_a)
        .def(
            "forward_each",
            [](Model& self, const std::vector<Sequence*>& sequences, const Ids& ids) {
                const auto vocab = static_cast<size_t>(self.config().vocab_size);
                std::vector<float> logits(sequences.size() * vocab);
                {
                    const nb::gil_scoped_release release;
                    self.forward_each(sequences, {ids.data(), ids.size()}, logits.data());
                }
                return make_array(std::move(logits), {sequences.size(), vocab});
            },
            "sequences"_a, "ids"_a)
        .def(
            "step",
            [](Model& self, Sequence& sequence, int32_t token, Sampler& sampler,
               const std::vector<int32_t>& drafts) { return self.step(sequence, token, sampler, drafts); },
            "sequence"_a, "token"_a, "sampler"_a, "drafts"_a = std::vector<int32_t>(),
            nb::call_guard<nb::gil_scoped_release>())
        .def(
            "step_logits",
            [](Model& self, Sequence& sequence, int32_t token, const std::vector<int32_t>& drafts) {
                const auto vocab = static_cast<size_t>(self.config().vocab_size);
                std::vector<float> logits(vocab);
                {
                    const nb::gil_scoped_release release;
                    self.step_logits(sequence, token, drafts, logits.data());
                }
                return make_array(std::move(logits), {vocab});
            },
            "sequence"_a, "token"_a, "drafts"_a)
        .def(
            "step_each",
            [](Model& self, const std::vector<Sequence*>& sequences, const std::vector<int32_t>& tokens,
               const std::vector<Sampler*>& samplers) { return self.step_each(sequences, tokens, samplers); },
            "sequences"_a, "tokens"_a, "samplers"_a, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "trace",
            [](Model& self, Sequence& sequence, int32_t token) {
                std::vector<std::pair<std::string, std::vector<float>>> results;
                {
                    const nb::gil_scoped_release release;
                    results = self.trace(sequence, token);
                }
                std::vector<std::pair<std::string, nb::ndarray<nb::numpy, float>>> arrays;
                for (auto& [name, row] : results) {
                    const size_t count = row.size();
                    arrays.emplace_back(name, make_array(std::move(row), {count}));
                }
                return arrays;
            },
            "sequence"_a, "token"_a)
        .def("join", &Model::join, "sequence"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("leave", &Model::leave, "sequence"_a, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("passes", &Model::passes)
        .def_prop_ro("joined", &Model::joined)
        .def_prop_ro("can_verify", &Model::can_verify)
        .def_prop_ro("draws", &Model::draws)
        .def_prop_ro("counts", &Model::counts)
        .def_prop_ro("memory", &Model::memory)
        .def_prop_ro("backend", &Model::describe)
        .def_prop_ro("has_mtp", &Model::has_mtp)
        .def_prop_ro("op_count", &Model::op_count)
        .def_prop_ro("chunk", &Model::chunk)
        .def_prop_ro("unused_weights", &Model::unused_weights)
        .def_prop_ro("kv_bytes_per_token",
                     [](const Model& self) { return self.state_layout().kv.page_bytes() / kPageTokens; })
        .def_prop_ro("recurrent_bytes",
                     [](const Model& self) { return self.state_layout().recurrent.bytes(); });
}

}  // namespace
}  // namespace lily

NB_MODULE(_core, m) {
    m.doc() = "lily's native core: weights, state, graph and backends.";
    m.def("backends", &lily::backends);
    m.def("compile_kernels", &lily::compile_kernels, nb::call_guard<nb::gil_scoped_release>());
    m.def("backend_problem", &lily::backend_problem, nb::arg("name"));
    lily::register_errors();
    lily::bind_weights(m);
    lily::bind_state(m);
    lily::bind_sampler(m);
    lily::bind_model(m);
    lily::bind_restore(m);
    lily::bind_bench(m);
}
