#include "capture.h"

#include <algorithm>
#include <set>
#include <utility>

#include "log.h"
#include "machine.h"

namespace emulator {

using Lock = std::lock_guard<std::recursive_mutex>;

static std::set<Model*>& active() {
    static auto& models = *new std::set<Model*>;
    return models;
}

static thread_local Mode thread_mode = Mode::Global;

Mode exchange_mode(Mode mode) { return std::exchange(thread_mode, mode); }

Model* strictest_capture() {
    Lock lock(machine().lock);
    if (thread_mode == Mode::Relaxed) return nullptr;
    for (auto* model : active())
        if (model->mode != Mode::Relaxed) return model;
    return nullptr;
}

Status refuse(Model* model, const std::string& why) {
    if (model->invalid.empty()) model->invalid = why;
    return fail(STREAM_CAPTURED, "not allowed while capturing: " + why);
}

Status begin_capture(Stream* stream, Mode mode) {
    static uint32_t next = 1;
    Lock lock(machine().lock);
    if (stream == nullptr || stream == default_stream())
        return fail(PARAM_INVALID, "the default stream cannot capture");
    if (!active().empty()) return refuse(*active().begin(), "a second capture began inside the first");
    auto* model = new Model;
    model->id = next++;
    model->mode = mode;
    model->origin = stream;
    active().insert(model);
    return join(model, stream);
}

Status join(Model* model, Stream* stream) {
    stream->capturing = model;
    model->members.push_back(stream);
    return OK;
}

void append(Stream* stream, TaskPointer task) {
    if (stream->group != nullptr) stream->group->tasks.push_back(task);
    else stream->capturing->nodes.push_back({task, nullptr});
}

Status end_capture(Stream* stream, Model** result) {
    Lock lock(machine().lock);
    auto* model = stream->capturing;
    if (model == nullptr || model->origin != stream) return fail(PARAM_INVALID, "the stream has not begun a capture");
    if (stream->group != nullptr) refuse(model, "a task group was left open");
    for (auto* member : model->members) {
        member->capturing = nullptr;
        member->group = nullptr;
    }
    active().erase(model);
    *result = model;
    return model->invalid.empty() ? OK : fail(STREAM_CAPTURED, "the capture is invalid: " + model->invalid);
}

Status begin_group(Stream* stream) {
    Lock lock(machine().lock);
    auto* model = stream->capturing;
    if (model == nullptr) return fail(PARAM_INVALID, "a task group can only be begun on a capturing stream");
    if (stream->group != nullptr) return refuse(model, "task groups cannot be nested");
    model->groups.push_back(std::make_unique<Group>());
    stream->group = model->groups.back().get();
    stream->group->model = model;
    model->nodes.push_back({nullptr, stream->group});
    return OK;
}

Status end_group(Stream* stream, Group** group) {
    Lock lock(machine().lock);
    if (stream->group == nullptr) return fail(PARAM_INVALID, "no task group is open on this stream");
    if (stream->group->tasks.empty()) return refuse(stream->capturing, "a task group without a task");
    *group = std::exchange(stream->group, nullptr);
    return OK;
}

Status begin_update(Stream* stream, Group* group) {
    Lock lock(machine().lock);
    if (stream->capturing != nullptr) return refuse(stream->capturing, "a capturing stream cannot update a task group");
    if (stream->updating != nullptr) return fail(PARAM_INVALID, "an update is already open on this stream");
    stream->updating = group;
    stream->replacement.clear();
    return OK;
}

static std::string mismatch(const std::vector<TaskPointer>& before, const std::vector<TaskPointer>& after) {
    if (before.size() != after.size())
        return "an update has " + std::to_string(after.size()) + " tasks, its group " + std::to_string(before.size());
    for (size_t i = 0; i < before.size(); ++i)
        if (before[i]->name != after[i]->name) return "an update puts " + after[i]->name + " in place of " + before[i]->name;
    return "";
}

// The new tasks take effect in the order of the update stream, not at the host's call.
Status end_update(Stream* stream) {
    Lock lock(machine().lock);
    auto* group = std::exchange(stream->updating, nullptr);
    if (group == nullptr) return fail(PARAM_INVALID, "no update is open on this stream");
    auto tasks = std::exchange(stream->replacement, {});
    if (auto why = mismatch(group->tasks, tasks); !why.empty()) return fail(PARAM_INVALID, why);
    return submit(stream, {"update of a task group", [group, tasks] {
                               group->tasks = tasks;
                               return Step::Done;
                           }});
}

// A replay is one task. It keeps its position in the model while an external event blocks it.
struct Replay {
    Model* model;
    size_t node = 0;
    size_t within = 0;
    TaskPointer stuck;

    Step run() {
        for (; node < model->nodes.size(); ++node, within = 0) {
            auto& one = model->nodes[node];
            auto tasks = one.group != nullptr ? one.group->tasks : std::vector<TaskPointer>{one.task};
            for (; within < tasks.size(); ++within)
                if (tasks[within]->run() == Step::Blocked) {
                    stuck = tasks[within];
                    return Step::Blocked;
                }
        }
        return Step::Done;
    }
};

Status execute(Model* model, Stream* stream) {
    Lock lock(machine().lock);
    if (!model->invalid.empty()) return fail(PARAM_INVALID, "the model is invalid: " + model->invalid);
    if (stream != nullptr && stream->capturing != nullptr)
        return refuse(stream->capturing, "a model cannot be executed on a capturing stream");
    auto replay = std::make_shared<Replay>(Replay{model});
    return submit(stream, {"replay of model " + std::to_string(model->id), [replay] { return replay->run(); },
                           [replay] { return replay->stuck ? replay->stuck->blocked_by() : std::string("nothing"); }});
}

}  // namespace emulator
