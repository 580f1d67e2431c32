// A device in host memory. A stream is a thread with a queue, and every operation names the bytes that it reads and
// writes. Vector clocks, which events carry from stream to stream, tell at each launch whether earlier accesses to the
// same bytes are over by then: an access without order is reported whatever the timing of the threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace simulated {

// By stream: the number of its last launch that is known to be over.
using Clock = std::vector<uint64_t>;

void join(Clock& clock, const Clock& other);

// A point in a stream, as an event records it.
struct Mark {
  Clock clock;
  std::shared_future<void> reached;
  bool passed() const { return reached.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
};

class Stream {
 public:
  Stream(int number, int device, int64_t id);
  ~Stream();
  void push(std::function<void()> task);
  bool idle() const { return unfinished_ == 0; }
  std::string name() const;

  const int number;  // over all devices
  const int device;
  const int64_t id;  // 0 is the device's default stream
  Clock clock;       // under the lock of the runtime, as is all that follows from it

 private:
  void work();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  std::atomic<int64_t> unfinished_{0};
  bool closing_ = false;
  std::thread thread_;
};

// Bytes of a block: ascending spans [first, last), apart from each other.
using Bytes = std::vector<std::pair<int64_t, int64_t>>;

Bytes bytes_of(int64_t offset, int64_t itemsize, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

struct Access {
  int stream;
  uint64_t tick;  // the number of the launch among its stream's
  bool writes;
  Bytes bytes;
  std::string what;
  uint64_t life;  // of the block: how often it had been handed out
};

// Memory as the allocator hands it out, and the accesses to it that later ones may have to wait for.
struct Block {
  char* memory;
  size_t size;
  Stream* owner;  // the stream that was current when it was handed out: the only one that gets it again
  std::set<Stream*> recorded;
  std::vector<Access> accesses;
  uint64_t life = 0;
  std::string freed_at;
};

struct Use {
  Block* block;
  Bytes bytes;
  bool writes;
};

struct Settings {
  double delayed = 0;      // the part of the tasks that start late
  int delay_us = 0;        // at most
  uint64_t seed = 0;
  bool strict = false;     // memory is overwritten as soon as it is freed, not only when it is handed out again
  std::string wandering;   // "always", or "unless deterministic": the last bits of products change when repeated
  bool pitch_lost = false; // copies of rows with a pitch read them as if they had none
  std::string line_of;     // reports name the lines of files whose path contains this
};

Settings& settings();

int device_count();
void set_device_count(int count);
int current_device();
void set_current_device(int device);

Stream* current_stream(int device);
Stream* stream_of(int device, int64_t id);
Stream* new_stream(int device);
void reuse_streams();  // new streams are those that there are, until there are too few
Stream* exchange_current_stream(Stream* stream);  // returns the one before

void launch(Stream* stream, const std::string& what, const std::vector<Use>& uses, std::function<void()> task);
Mark mark(Stream* stream);
void wait(Stream* stream, const Mark& mark);  // the stream waits, the host goes on
void synchronize(const Mark& mark);           // the host waits
void synchronize_device(int device);

Block* allocate(size_t bytes, int device);
void release(Block* block);
void record_stream(Block* block, Stream* stream);
std::pair<size_t, size_t> memory(int device);  // bytes in use, and in all
void empty_cache();                            // gives back what is not in use

std::vector<std::string> take_reports();
std::vector<std::string> take_launched();  // what the calling thread has launched since it was last asked, see runtime.cpp
void stop();  // ends all streams' threads, once their queues are empty

}  // namespace simulated
