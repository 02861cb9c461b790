// Captured models: tasks enqueued during capture, replayed in that order. Task groups: tasks that an update replaces
// between two replays.
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

// One entry: a task or a task group.
struct Node {
    TaskPointer task;
    Group* group = nullptr;
};

struct Model {
    uint32_t id = 0;
    Mode mode = Mode::Global;
    Stream* origin = nullptr;
    std::vector<Stream*> members;  // streams that take part in the capture
    std::vector<Node> nodes;
    std::vector<std::unique_ptr<Group>> groups;
    std::string invalid;           // reason for which the capture has failed
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

// Fail a call that a capture must not contain, and invalidate the capture, as the device does.
Status refuse(Model* model, const std::string& why);

// The running capture with a mode that forbids waits in every stream, or nullptr. `exchange` sets the thread's mode.
Model* strictest_capture();
Mode exchange_mode(Mode mode);

}  // namespace emulator
