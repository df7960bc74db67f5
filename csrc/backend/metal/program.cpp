#include "backend/metal/program.h"

#include <variant>

#include "backend/metal/rows.h"

namespace lily::metal {

Program::Program(std::span<const Op> list, DeviceStates& states, Builder& builder)
    : ops(list.data()), states(states) {
    for (const Op& op : list) {
        if (std::holds_alternative<Head>(op)) head = few.size();
        few.push_back(std::visit([&](const auto& o) { return make_step(o, builder); }, op));
    }
    if (!builder.switches.matrix_prefill) return;
    for (const Op& op : list) {
        many.push_back(std::visit([&](const auto& o) { return make_rows_step(o, builder); }, op));
    }
}

Completion Passes::commit(const Stretch& stretch, bool many, Block& block) {
    buffers_.make_room_for_splits(device_, sizes_, block.splits);
    const DeviceStates::Held held = stretch.program.states.hold();
    block.cache = held.pages;
    for (size_t i = stretch.first;;) {
        const Step* host = nullptr;
        Pass pass = stream_.begin(many ? "prompt" : "step");
        while (i < stretch.end && !host) {
            const Step& step = stretch.program.step(i++, many);
            step.encode(block, pass);
            if (step.has_host_part()) host = &step;
        }
        const Completion done = pass.commit();
        if (!host) return done;
        done.wait();
        host->run_host_part(block);
        if (i == stretch.end) return done;
    }
}

Completion Passes::commit_head(const Program& program, Block& block) {
    block.head_again = true;
    Pass pass = stream_.begin("logits");
    program.few[program.head]->encode(block, pass);
    return pass.commit();
}

}  // namespace lily::metal
