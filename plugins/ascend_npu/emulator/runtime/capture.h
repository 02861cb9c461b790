// Captured models: what a stream was told while it captured, replayed in that order; and task groups, whose tasks an
// update replaces between two replays.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "stream.h"

namespace emulator {

enum class Mode { Global = 0, ThreadLocal = 1, Relaxed = 2 };

struct Group {
    Model* model = nullptr;
    std::vector<TaskPointer> tasks;
};

// One entry: a task, or a whole group in its place.
struct Node {
    TaskPointer task;
    Group* group = nullptr;
};

struct Model {
    uint32_t id = 0;
    Mode mode = Mode::Global;
    Stream* origin = nullptr;
    std::vector<Stream*> members;  // streams that take part while it is captured
    std::vector<Node> nodes;
    std::vector<std::unique_ptr<Group>> groups;
    std::string invalid;           // why the capture can no longer succeed
    bool replaying = false;
};

Status begin_capture(Stream* stream, Mode mode);
Status end_capture(Stream* stream, Model** model);
Status join(Model* model, Stream* stream);
void append(Stream* stream, TaskPointer task);

Status begin_group(Stream* stream);
Status end_group(Stream* stream, Group** group);
Status begin_update(Stream* stream, Group* group);
Status end_update(Stream* stream);

Status execute(Model* model, Stream* stream);

// Fail a call that no capture may contain, and spoil the capture, as the device does.
Status refuse(Model* model, const std::string& why);

// A capture under way whose mode forbids waits anywhere, or nullptr; `exchange` sets the calling thread's mode.
Model* strictest_capture();
Mode exchange_mode(Mode mode);

}  // namespace emulator
