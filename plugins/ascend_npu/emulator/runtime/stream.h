// Streams are first-in, first-out and lazy: a task runs when something waits for it, or when a seed says so.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "abi.h"

namespace emulator {

enum class Step { Done, Blocked };

struct Task {
    std::string name;
    std::function<Step()> run;
    std::function<std::string()> blocked_by = [] { return std::string("nothing"); };
};

using TaskPointer = std::shared_ptr<Task>;

struct Model;
struct Group;

struct Stream {
    int id = 0;
    std::deque<TaskPointer> queue;
    Status error = OK;         // sticky: what an asynchronous failure left behind
    std::string why;
    Model* capturing = nullptr;
    Group* group = nullptr;    // open task group while capturing
    Group* updating = nullptr; // group whose tasks are being replaced
    std::vector<TaskPointer> replacement;
};

struct Event {
    uint64_t asked = 0;        // record calls so far
    uint64_t done = 0;         // the latest one that has run
    Model* captured = nullptr; // recorded inside this capture
};

// All calls below lock the machine; tasks run on its own thread, so that they never meet the caller's Python state.
Stream* create_stream();
Status destroy_stream(Stream* stream);
Stream* default_stream();
Event* create_event();
Status destroy_event(Event* event);

// Hand a task to a stream: it is queued, or captured, or becomes the replacement in a group's update.
Status submit(Stream* stream, Task task);
Status record(Event* event, Stream* stream);
Status wait(Event* event, Stream* stream);

Status synchronize(Stream* stream);
Status synchronize(Event* event);
Status synchronize_device();
bool finished(Stream* stream);
bool finished(Event* event);

// Run `work` on the machine's thread now, in no stream.
void run_now(const std::function<void()>& work);

}  // namespace emulator
