// The machine behind the streams: its lock, its thread, who runs next, and what is wrong when nobody can.
#pragma once

#include <functional>
#include <mutex>
#include <set>

#include "stream.h"

namespace emulator {

// By number, not by address: one seed is one schedule in every process.
struct ByNumber {
    bool operator()(const Stream* a, const Stream* b) const { return a->id < b->id; }
};

struct Machine {
    std::recursive_mutex lock;
    std::set<Stream*, ByNumber> streams;
    std::set<Event*> events;
    Stream* standard = nullptr;
    int next_id = 0;

    // Run tasks until `finished`, `first` before the others. Returns DEADLOCK with a report when nothing can run.
    Status drive(const std::function<bool()>& finished, Stream* first);
    // With a seed: run a few tasks of any stream, as a device that is ahead of the host would.
    void run_ahead();

private:
    bool step(Stream* stream);
    bool step_any(Stream* first);
    std::string report() const;
};

Machine& machine();

}  // namespace emulator
