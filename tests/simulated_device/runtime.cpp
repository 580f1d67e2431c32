#include "runtime.h"

#include <Python.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <frameobject.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <sstream>

namespace simulated {
namespace {

constexpr size_t GRAIN = 512;  // sizes of memory are multiples of it
constexpr int LINES = 4;       // of Python, in a report
constexpr int FRAMES = 60;     // that are searched for them

struct Waiting {  // freed memory whose recorded streams have not come to their marks
  Block* block;
  std::vector<Mark> marks;
};

// All state. Its lock is never held while Python's is waited for.
struct Runtime {
  std::mutex lock;
  std::vector<std::unique_ptr<Stream>> streams;
  std::map<int, std::vector<Stream*>> reusable;  // by device
  std::map<Stream*, std::multimap<size_t, Block*>> free;
  std::vector<Waiting> waiting;
  std::map<int, std::pair<size_t, size_t>> bytes;
  std::vector<std::string> reports;
  std::set<std::string> reported;
  std::string error;  // the first of an operation that nobody has been told of
  std::atomic<bool> stopping{false};
  std::atomic<int> devices{0};
};

Runtime& the() {
  static auto* runtime = new Runtime();  // outlives the tensors that are freed as the process ends
  return *runtime;
}

using Lock = std::lock_guard<std::mutex>;

thread_local int device_here = 0;
thread_local std::map<int, Stream*> stream_here;
thread_local Clock host_clock;  // what this thread has waited for
thread_local std::vector<std::string> launched;  // what this thread has launched, "wait" where it waited, in order

Stream* make_stream(int device, int64_t id) {
  auto& streams = the().streams;
  streams.push_back(std::make_unique<Stream>(static_cast<int>(streams.size()), device, id));
  return streams.back().get();
}

Stream* find_stream(int device, int64_t id) {
  for (auto& stream : the().streams)
    if (stream->device == device && stream->id == id)
      return stream.get();
  return id == 0 ? make_stream(device, 0) : nullptr;
}

uint64_t at(const Clock& clock, int stream) { return stream < static_cast<int>(clock.size()) ? clock[stream] : 0; }

bool overlap(const Bytes& one, const Bytes& other) {
  auto a = one.begin(), b = other.begin();
  while (a != one.end() && b != other.end()) {
    if (a->second <= b->first)
      ++a;
    else if (b->second <= a->first)
      ++b;
    else
      return true;
  }
  return false;
}

// Where in Python this thread is, innermost first.
std::string python_lines() {
  const std::string& part = settings().line_of;
  if (the().stopping || part.empty() || !Py_IsInitialized())
    return "";
  PyGILState_STATE state = PyGILState_Ensure();
  std::string text;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  for (int seen = 0, told = 0; frame != nullptr && seen < FRAMES && told < LINES; ++seen) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* name = PyUnicode_AsUTF8(code->co_filename);
    std::string path = name == nullptr ? "" : name;
    if (size_t found = path.rfind(part); found != std::string::npos) {
      text += (told++ ? " < " : " at ") + path.substr(found) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    }
    Py_DECREF(code);
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  PyGILState_Release(state);
  return text;
}

void raise_error() {
  std::string error;
  {
    Lock lock(the().lock);
    error.swap(the().error);
  }
  TORCH_CHECK(error.empty(), "simulated device: an earlier operation failed: ", error);
}

void note_error(const std::string& error) {
  Lock lock(the().lock);
  if (the().error.empty())
    the().error = error;
}

void report(const Block& block, const Access& before, const Access& now) {
  bool again = before.life != now.life;
  auto told = [](const Access& access) {
    return std::string(access.writes ? "write" : "read") + " on " + the().streams[access.stream]->name() + ": " + access.what;
  };
  std::ostringstream text;
  text << (again ? "memory is used again that another stream was not recorded to use" : "no event orders two accesses")
       << "\n  " << told(before) << "\n  " << told(now);
  if (again)
    text << "\n  freed" << block.freed_at;
  if (the().reported.insert(before.what + "|" + now.what).second)
    the().reports.push_back(text.str());
}

// Notes an access to a block, and reports those before it that it is not ordered with.
void note(Stream* stream, const Use& use, const std::string& what) {
  Block& block = *use.block;
  Access now{stream->number, stream->clock[stream->number], use.writes, use.bytes, what, block.life};
  std::vector<Access> kept;
  for (Access& before : block.accesses) {
    bool ordered = at(stream->clock, before.stream) >= before.tick;
    if (!ordered && (before.writes || now.writes) && overlap(before.bytes, now.bytes))
      report(block, before, now);
    bool inside = now.bytes.size() == 1 && before.bytes.front().first >= now.bytes.front().first &&
                  before.bytes.back().second <= now.bytes.front().second;
    bool repeated = !now.writes && !before.writes && before.stream == now.stream && before.bytes == now.bytes;
    if (!ordered || !((now.writes && inside) || repeated))  // else who is ordered behind this one is behind that, too
      kept.push_back(std::move(before));
  }
  kept.push_back(std::move(now));
  block.accesses = std::move(kept);
}

void launch_locked(Stream* stream, const std::string& what, const std::vector<Use>& uses, std::function<void()> task) {
  join(stream->clock, host_clock);
  if (static_cast<int>(stream->clock.size()) <= stream->number)
    stream->clock.resize(stream->number + 1);
  ++stream->clock[stream->number];
  for (const Use& use : uses)
    note(stream, use, what);
  stream->push(std::move(task));
}

Mark mark_locked(Stream* stream) {
  join(stream->clock, host_clock);
  auto reached = std::make_shared<std::promise<void>>();
  Mark made{stream->clock, reached->get_future().share()};
  stream->push([reached] { reached->set_value(); });
  return made;
}

// All bits become ones: NaN in floating-point numbers, -1 in integers.
void overwrite(Block* block, const std::string& what) {
  char* memory = block->memory;
  size_t size = block->size;
  launch_locked(block->owner, what, {{block, {{0, static_cast<int64_t>(size)}}, true}},
                [memory, size] { std::memset(memory, 0xff, size); });
}

void make_free(Block* block) {
  block->recorded.clear();
  ++block->life;
  if (settings().strict)
    overwrite(block, "freed memory is overwritten" + block->freed_at);
  the().free[block->owner].emplace(block->size, block);
}

// Frees the memory whose recorded streams are through with it, as far as this shows now.
void look_at_waiting() {
  std::vector<Waiting> still;
  for (Waiting& one : the().waiting) {
    Clock over;
    bool passed = true;
    for (const Mark& mark : one.marks) {
      passed = passed && mark.passed();
      join(over, mark.clock);
    }
    if (!passed) {
      still.push_back(std::move(one));
      continue;
    }
    auto& accesses = one.block->accesses;
    auto is_over = [&](const Access& access) { return at(over, access.stream) >= access.tick; };
    accesses.erase(std::remove_if(accesses.begin(), accesses.end(), is_over), accesses.end());
    make_free(one.block);
  }
  the().waiting = std::move(still);
}

}  // namespace

void join(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (size_t i = 0; i < other.size(); ++i)
    clock[i] = std::max(clock[i], other[i]);
}

Settings& settings() {
  static auto* settings = new Settings();
  return *settings;
}

// Streams --------------------------------------------------------------------------------------------------------------

Stream::Stream(int number, int device, int64_t id)
    : number(number), device(device), id(id), thread_([this] { work(); }) {}

Stream::~Stream() {
  {
    Lock lock(mutex_);
    closing_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

std::string Stream::name() const { return "stream " + std::to_string(id) + " of device " + std::to_string(device); }

void Stream::push(std::function<void()> task) {
  ++unfinished_;
  {
    Lock lock(mutex_);
    queue_.push_back(std::move(task));
  }
  wake_.notify_one();
}

void Stream::work() {
  c10::InferenceMode inference(true);
  std::mt19937_64 random;
  uint64_t seed = ~settings().seed;
  while (true) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return closing_ || !queue_.empty(); });
      if (queue_.empty())
        return;
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    if (seed != settings().seed)
      random.seed((seed = settings().seed) * 1000003 + number);
    if (settings().delayed > std::uniform_real_distribution<double>()(random))
      std::this_thread::sleep_for(
          std::chrono::microseconds(std::uniform_int_distribution<int>(0, settings().delay_us)(random)));
    try {
      task();
    } catch (const c10::Error& error) {
      note_error(error.what_without_backtrace());
    } catch (const std::exception& error) {
      note_error(error.what());
    }
    task = nullptr;
    --unfinished_;
  }
}

int device_count() { return the().devices; }
void set_device_count(int count) { the().devices = count; }
int current_device() { return device_here; }

void set_current_device(int device) { device_here = device; }

Stream* current_stream(int device) {
  if (device < 0)
    device = device_here;
  Stream*& stream = stream_here[device];
  if (stream == nullptr)
    stream = stream_of(device, 0);
  return stream;
}

Stream* stream_of(int device, int64_t id) {
  Lock lock(the().lock);
  Stream* found = find_stream(device < 0 ? device_here : device, id);
  TORCH_CHECK(found != nullptr, "simulated device ", device, " has no stream ", id);
  return found;
}

Stream* new_stream(int device) {
  Lock lock(the().lock);
  auto& reusable = the().reusable[device];
  if (!reusable.empty()) {
    Stream* stream = reusable.back();
    reusable.pop_back();
    return stream;
  }
  find_stream(device, 0);
  return make_stream(device, static_cast<int64_t>(the().streams.size()));
}

void reuse_streams() {
  Lock lock(the().lock);
  the().reusable.clear();
  for (auto& stream : the().streams)
    if (stream->id != 0)
      the().reusable[stream->device].push_back(stream.get());
}

Stream* exchange_current_stream(Stream* stream) {
  Stream* before = current_stream(stream->device);
  stream_here[stream->device] = stream;
  return before;
}

void launch(Stream* stream, const std::string& what, const std::vector<Use>& uses, std::function<void()> task) {
  raise_error();
  std::string told = what + python_lines();
  Lock lock(the().lock);
  launch_locked(stream, told, uses, std::move(task));
  launched.push_back(what);
}

std::vector<std::string> take_launched() { return std::exchange(launched, {}); }

Mark mark(Stream* stream) {
  Lock lock(the().lock);
  return mark_locked(stream);
}

void wait(Stream* stream, const Mark& mark) {
  Lock lock(the().lock);
  join(stream->clock, mark.clock);
  stream->push([reached = mark.reached] { reached.wait(); });
}

void synchronize(const Mark& mark) {
  mark.reached.wait();
  join(host_clock, mark.clock);
  launched.push_back("wait");
  raise_error();
}

void synchronize_device(int device) {
  std::vector<Mark> marks;
  {
    Lock lock(the().lock);
    for (auto& stream : the().streams)
      if (stream->device == device)
        marks.push_back(mark_locked(stream.get()));
  }
  for (const Mark& mark : marks)
    synchronize(mark);
}

// Memory ---------------------------------------------------------------------------------------------------------------

Block* allocate(size_t bytes, int device) {
  Stream* stream = current_stream(device);
  std::string lines = python_lines();
  size_t size = (std::max<size_t>(bytes, 1) + GRAIN - 1) / GRAIN * GRAIN;
  Lock lock(the().lock);
  look_at_waiting();
  auto& free = the().free[stream];
  Block* block;
  if (auto found = free.lower_bound(size); found != free.end()) {
    found = std::prev(free.upper_bound(found->first));  // of that size the one that was freed last
    block = found->second;
    free.erase(found);
    overwrite(block, "memory is handed out again" + lines);
  } else {
    block = new Block{static_cast<char*>(std::aligned_alloc(GRAIN, size)), size, stream};
    TORCH_CHECK(block->memory != nullptr, "the host has no memory for the simulated device");
    std::memset(block->memory, 0xff, size);
    the().bytes[device].second += size;
  }
  the().bytes[device].first += block->size;
  return block;
}

void release(Block* block) {
  if (the().stopping)
    return;
  std::string lines = python_lines();
  Lock lock(the().lock);
  the().bytes[block->owner->device].first -= block->size;
  block->freed_at = lines;
  block->recorded.erase(block->owner);
  if (block->recorded.empty())
    return make_free(block);
  std::vector<Mark> marks;
  for (Stream* stream : block->recorded)
    marks.push_back(mark_locked(stream));
  the().waiting.push_back({block, std::move(marks)});
}

void record_stream(Block* block, Stream* stream) {
  Lock lock(the().lock);
  block->recorded.insert(stream);
}

std::pair<size_t, size_t> memory(int device) {
  Lock lock(the().lock);
  return the().bytes[device];
}

void empty_cache() {
  Lock lock(the().lock);
  look_at_waiting();
  for (auto& [stream, blocks] : the().free) {
    for (auto& [size, block] : blocks) {
      the().bytes[stream->device].second -= size;
      stream->push([block = block] {  // what the stream still does to it comes first
        std::free(block->memory);
        delete block;
      });
    }
    blocks.clear();
  }
}

Bytes bytes_of(int64_t offset, int64_t itemsize, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  int64_t numel = 1, last = 0;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    numel *= strides[dim] == 0 ? 1 : sizes[dim];
    last += (sizes[dim] - 1) * strides[dim];
  }
  if (last + 1 == numel)  // without gaps
    return {{offset, offset + numel * itemsize}};
  std::vector<int64_t> starts{offset};
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    std::vector<int64_t> all;
    for (int64_t start : starts)
      for (int64_t i = 0; i < (strides[dim] == 0 ? 1 : sizes[dim]); ++i)
        all.push_back(start + i * strides[dim] * itemsize);
    starts = std::move(all);
  }
  std::sort(starts.begin(), starts.end());
  Bytes spans;
  for (int64_t start : starts) {
    if (!spans.empty() && start <= spans.back().second)
      spans.back().second = std::max(spans.back().second, start + itemsize);
    else
      spans.emplace_back(start, start + itemsize);
  }
  return spans;
}

std::vector<std::string> take_reports() {
  Lock lock(the().lock);
  the().reported.clear();
  return std::exchange(the().reports, {});
}

void stop() {
  the().stopping = true;
  std::vector<std::unique_ptr<Stream>> ending;
  {
    Lock lock(the().lock);
    ending.swap(the().streams);
  }
}

}  // namespace simulated
