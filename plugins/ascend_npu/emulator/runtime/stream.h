// Streams are first in, first out, and lazy: a task runs when a call waits for it, or when the seeded schedule runs it.
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
    Status error = OK;         // sticky: status of an asynchronous failure
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

// All calls below lock the machine. Tasks run on the machine's thread, without access to the caller's Python state.
Stream* create_stream();
Status destroy_stream(Stream* stream);
Stream* default_stream();
Event* create_event();
Status destroy_event(Event* event);

// Give a task to a stream: the stream queues it, captures it, or uses it in a group's update.
Status submit(Stream* stream, Task task);
Status record(Event* event, Stream* stream);
Status wait(Event* event, Stream* stream);

Status synchronize(Stream* stream);
Status synchronize(Event* event);
Status synchronize_device();
bool finished(Stream* stream);
bool finished(Event* event);

// Run `work` on the machine's thread now, outside all streams.
void run_now(const std::function<void()>& work);

}  // namespace emulator
