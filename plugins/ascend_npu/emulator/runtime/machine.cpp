#include "machine.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <condition_variable>
#include <random>
#include <sstream>
#include <thread>

#include "log.h"
#include "settings.h"

namespace emulator {

Machine& machine() {
    static Machine& one = *new Machine;  // never destroyed: its thread lives as long as the process
    return one;
}

static std::mt19937_64& dice() {
    static std::mt19937_64 generator(settings().seed);
    return generator;
}

// One thread runs every task. It has no Python state, no dispatch mode and no gradients.
class Worker {
public:
    Worker() { std::thread([this] { loop(); }).detach(); }

    void run(const std::function<void()>& work) {
        std::unique_lock<std::mutex> lock(guard_);
        if (std::this_thread::get_id() == self_) {
            lock.unlock();
            work();
            return;
        }
        work_ = &work;
        changed_.notify_all();
        changed_.wait(lock, [this] { return work_ == nullptr; });
    }

private:
    void loop() {
        c10::InferenceMode always;  // so that views from inside and outside the caller's inference mode behave alike
        std::unique_lock<std::mutex> lock(guard_);
        self_ = std::this_thread::get_id();
        while (true) {
            changed_.wait(lock, [this] { return work_ != nullptr; });
            const auto* work = work_;
            lock.unlock();
            (*work)();
            lock.lock();
            work_ = nullptr;
            changed_.notify_all();
        }
    }

    std::mutex guard_;
    std::condition_variable changed_;
    const std::function<void()>* work_ = nullptr;
    std::thread::id self_;
};

void run_now(const std::function<void()>& work) {
    static Worker& worker = *new Worker;
    worker.run(work);
}

bool Machine::step(Stream* stream) {
    if (stream->queue.empty()) return false;
    auto task = stream->queue.front();
    try {
        if (task->run() == Step::Blocked) return false;
    } catch (const std::exception& error) {
        stream->error = OPERATOR_FAILED;
        std::string what = error.what();
        stream->why = task->name + ": " + what.substr(0, what.find("\nException raised from"));
        log_call("failed " + stream->why);
    }
    stream->queue.pop_front();
    return true;
}

bool Machine::step_any(Stream* first) {
    std::vector<Stream*> order;
    for (auto* stream : streams)
        if (!stream->queue.empty()) order.push_back(stream);
    if (settings().fuzz) {
        std::shuffle(order.begin(), order.end(), dice());
    } else {
        std::stable_sort(order.begin(), order.end(), [first](Stream* a, Stream* b) {
            return std::pair(a != first, a->id) < std::pair(b != first, b->id);
        });
    }
    for (auto* stream : order)
        if (step(stream)) return true;
    return false;
}

Status Machine::drive(const std::function<bool()>& finished, Stream* first) {
    bool stuck = false;
    run_now([&] {
        while (!finished() && !stuck) stuck = !step_any(first);
    });
    return stuck ? fail(DEADLOCK, report()) : OK;
}

void Machine::run_ahead() {
    if (!settings().fuzz || dice()() % 2 == 0) return;
    auto steps = dice()() % 4;
    run_now([&] {
        for (uint64_t i = 0; i < steps && step_any(nullptr); ++i) {
        }
    });
}

std::string Machine::report() const {
    std::ostringstream text;
    text << "deadlock: no stream can continue.";
    for (const auto* stream : streams)
        if (!stream->queue.empty())
            text << " Stream " << stream->id << " is at " << stream->queue.front()->name << ", waiting for "
                 << stream->queue.front()->blocked_by() << ";";
    return text.str();
}

}  // namespace emulator
