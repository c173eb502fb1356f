// A fake accelerator: two devices in main memory whose streams do as little as they may.
//
// A copy between main memory and a device is put into the queue of its stream. It runs when a wait,
// a synchronize or a kernel of its stream demands it, and never before. So a missing wait is a wrong
// number every time.
//
// A kernel runs when it is called, after everything that is queued in its stream. Each block of
// memory knows which streams have read and written it, and each stream knows which work of other
// streams it has waited for. A kernel or a copy that uses memory without such a wait raises an error.
// New memory and memory that was freed too early are filled with 0xFF, which is NaN in floats.
//
// One mutex guards everything here. A kernel of torch under it may take Python's lock, so a thread
// that has Python's lock gives it back while it waits for the mutex.

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

// Python's own functions, which the interpreter has when it loads this file.
extern "C" {
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::IValue;

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr size_t kDeviceBytes = size_t{1} << 30;
constexpr int kPoison = 0xFF;

std::recursive_mutex mutex;

class Lock {
 public:
  explicit Lock(std::recursive_mutex& mutex) : mutex_(mutex) {
    if (mutex_.try_lock()) return;
    void* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    mutex_.lock();
    if (state != nullptr) PyEval_RestoreThread(state);
  }
  ~Lock() { mutex_.unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  std::recursive_mutex& mutex_;
};

// How far each stream has come, by the stream's number.
struct Clock {
  std::vector<uint64_t> ticks;
  uint64_t of(size_t number) const { return number < ticks.size() ? ticks[number] : 0; }
  void note(size_t number, uint64_t tick) {
    if (ticks.size() <= number) ticks.resize(number + 1, 0);
    ticks[number] = std::max(ticks[number], tick);
  }
  void join(const Clock& other) {
    for (size_t n = 0; n < other.ticks.size(); ++n) note(n, other.ticks[n]);
  }
};

struct Task {
  uint64_t tick;
  std::function<void()> run;
};

struct StreamState {
  size_t number;
  Device device;
  std::deque<Task> tasks;
  uint64_t issued = 0;
  uint64_t executed = 0;
  Clock seen;  // the work of all streams that comes before the next work of this one
};

std::vector<std::unique_ptr<StreamState>> streams;  // the first ones are the devices' default streams
Clock done;  // the work that a thread knows to be finished
bool is_initialized = false;  // whether the process has used a device
std::vector<std::string> faults;
size_t num_raised = 0;
std::map<int64_t, int64_t> waits;  // by the number of the thread

thread_local DeviceIndex current_device = 0;
thread_local size_t current_streams[kDevices] = {0, 1};

StreamState& new_stream(Device device) {
  auto state = std::make_unique<StreamState>(StreamState{streams.size(), device, {}, 0, 0, {}});
  streams.push_back(std::move(state));
  return *streams.back();
}

StreamState& state_of(const c10::Stream& stream) {
  auto default_number = static_cast<size_t>(stream.device_index());
  return *streams.at(stream.id() == 0 ? default_number : static_cast<size_t>(stream.id()));
}

c10::Stream stream_of(const StreamState& state) {
  auto id = state.number < kDevices ? 0 : static_cast<int64_t>(state.number);
  return c10::Stream(c10::Stream::UNSAFE, state.device, id);
}

StreamState& current(Device device) {
  auto index = device.has_index() ? device.index() : current_device;
  return *streams.at(current_streams[index]);
}

uint64_t issue(StreamState& stream, std::function<void()> run) {
  stream.seen.note(stream.number, ++stream.issued);
  stream.tasks.push_back({stream.issued, std::move(run)});
  return stream.issued;
}

// Runs what is queued in a stream up to a tick.
void reach(StreamState& stream, uint64_t tick) {
  while (stream.executed < tick && !stream.tasks.empty()) {
    auto task = std::move(stream.tasks.front());
    stream.tasks.pop_front();
    task.run();
    stream.executed = task.tick;
  }
}

void count_wait() { ++waits[syscall(SYS_gettid)]; }

// The calling thread waits for all work of a stream.
void finish(StreamState& stream) {
  count_wait();
  reach(stream, stream.issued);
  done.join(stream.seen);
}

void wait(StreamState& stream, StreamState& other) {
  auto tick = other.issued;
  stream.seen.join(other.seen);
  issue(stream, [&other, tick] { reach(other, tick); });
}

struct Use {
  size_t stream;
  uint64_t tick;
};

bool is_before(const Use& use, const StreamState& stream) {
  return use.stream == stream.number || use.tick <= stream.seen.of(use.stream) ||
      use.tick <= done.of(use.stream);
}

// Memory of a device. Queued work keeps it.
struct Block {
  char* memory;
  size_t num_bytes;
  DeviceIndex device;
  size_t home;  // the stream in which it was allocated
  Use write;
  std::map<size_t, uint64_t> reads{};
  std::set<size_t> recorded{};
  ~Block() { free(memory); }
};

// Pinned main memory. Queued work keeps it, too.
struct Pinned {
  char* memory;
  size_t num_bytes;
  int queued_unrecorded = 0;  // copies of which the allocator does not know
  ~Pinned() { free(memory); }
};

template <typename Memory>
using ByAddress = std::map<const char*, std::shared_ptr<Memory>>;
ByAddress<Block> blocks;
ByAddress<Pinned> pinned_blocks;
c10::CachingAllocator::Stat allocated[kDevices];

template <typename Memory>
std::shared_ptr<Memory> find_in(const ByAddress<Memory>& all, const void* address) {
  auto place = all.upper_bound(static_cast<const char*>(address));
  if (place == all.begin()) return nullptr;
  auto found = std::prev(place)->second;
  return address < found->memory + found->num_bytes ? found : nullptr;
}

char* poisoned(size_t num_bytes) {
  auto memory = static_cast<char*>(aligned_alloc(64, (num_bytes + 63) / 64 * 64));
  TORCH_CHECK(memory != nullptr, "fake: main memory is short.");
  std::memset(memory, kPoison, num_bytes);
  return memory;
}

void raise_faults() {
  if (num_raised < faults.size()) {
    num_raised = faults.size();
    TORCH_CHECK(false, "fake: ", faults.back());
  }
}

std::string name_of(size_t number) {
  auto index = std::to_string(streams[number]->device.index());
  return (number < kDevices ? "the default stream" : "stream " + std::to_string(number)) +
      " of fake:" + index;
}

void check_order(const Use& use, const StreamState& stream, const std::string& what) {
  TORCH_CHECK(
      is_before(use, stream), "fake: ", what, " in ", name_of(stream.number),
      " uses memory that ", name_of(use.stream), " uses, and nobody has waited.");
}

// Notes a use of memory by the next work of a stream.
void use(Block& block, const StreamState& stream, bool writes, const std::string& what) {
  check_order(block.write, stream, what);
  auto tick = stream.issued + 1;
  if (!writes) {
    block.reads[stream.number] = tick;
    return;
  }
  for (auto [number, when] : block.reads) check_order({number, when}, stream, what);
  block.reads.clear();
  block.write = {stream.number, tick};
}

void free_block(void* context) {
  if (context == nullptr) return;
  Lock lock(mutex);
  auto place = blocks.find(static_cast<char*>(context));
  auto block = place->second;
  blocks.erase(place);
  allocated[block->device].decrease(block->num_bytes);
  auto& home = *streams[block->home];
  auto uses = block->reads;
  uses[block->write.stream] = std::max(uses[block->write.stream], block->write.tick);
  for (auto [number, tick] : uses) {
    if (is_before({number, tick}, home) || block->recorded.count(number)) continue;
    std::memset(block->memory, kPoison, block->num_bytes);
    faults.push_back(
        "memory of " + name_of(block->home) + " was freed while " + name_of(number) +
        " uses it, without `record_stream`.");
    return;
  }
}

void free_pinned(void* context) {
  if (context == nullptr) return;
  Lock lock(mutex);
  auto place = pinned_blocks.find(static_cast<char*>(context));
  auto pinned = place->second;
  pinned_blocks.erase(place);
  if (pinned->queued_unrecorded > 0) {
    std::memset(pinned->memory, kPoison, pinned->num_bytes);
    faults.push_back("pinned memory was freed while a copy uses it.");
  }
}

struct FakeAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    Lock lock(mutex);
    is_initialized = true;
    auto index = current_device;
    if (num_bytes == 0) return {nullptr, nullptr, &free_block, Device(kFake, index)};
    auto free_bytes = kDeviceBytes - static_cast<size_t>(allocated[index].current);
    TORCH_CHECK_WITH(
        OutOfMemoryError, num_bytes <= free_bytes, "fake out of memory: ", num_bytes, " of ",
        free_bytes, " free bytes of fake:", static_cast<int>(index), " were wanted.");
    auto& home = current(Device(kFake, index));
    auto memory = poisoned(num_bytes);
    // Whatever used the memory before is earlier work of the stream.
    Use write{home.number, home.issued};
    blocks[memory].reset(new Block{memory, num_bytes, index, home.number, write});
    allocated[index].increase(num_bytes);
    return {memory, memory, &free_block, Device(kFake, index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    default_copy_data(target, source, num_bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Lock lock(mutex);
    if (auto block = find_in(blocks, pointer.get())) block->recorded.insert(state_of(stream).number);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    Lock lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stats.reserved_bytes[0] = allocated[index];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex index) override {
    Lock lock(mutex);
    allocated[index].peak = allocated[index].current;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    Lock lock(mutex);
    return {kDeviceBytes - static_cast<size_t>(allocated[index].current), kDeviceBytes};
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    Lock lock(mutex);
    is_initialized = true;
    if (num_bytes == 0) return {nullptr, nullptr, &free_pinned, c10::kCPU};
    auto memory = poisoned(num_bytes);
    pinned_blocks[memory].reset(new Pinned{memory, num_bytes});
    return {memory, memory, &free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    default_copy_data(target, source, num_bytes);
  }
};

FakeAllocator allocator;
PinnedAllocator pinned_allocator;

// A generator of a device draws what torch's generator of processors draws.
struct FakeGenerator final : c10::GeneratorImpl {
  explicit FakeGenerator(DeviceIndex index, uint64_t seed = c10::detail::getNonDeterministicRandom())
      : GeneratorImpl(Device(kFake, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "fake: generators have no offset."); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "fake: generators have no offset."); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return at::Generator(inner).seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  FakeGenerator* clone_impl() const override {
    auto copy = new FakeGenerator(device_.index());
    copy->inner = inner.clone();
    return copy;
  }
  at::Generator inner;
};

std::vector<at::Generator>& default_generators() {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex n = 0; n < kDevices; ++n) made.push_back(at::make_generator<FakeGenerator>(n, 0));
    return made;
  }();
  return all;
}

at::Generator& inner_of(const at::Generator& generator) {
  return static_cast<FakeGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

struct Event {
  StreamState* stream;
  uint64_t tick;
  Clock seen;
  std::shared_ptr<double> milliseconds;
};

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kFake, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "fake: there is no device ", device, ".");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(Device device) const override { return stream_of(current(device)); }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(Device device, int) const override {
    Lock lock(mutex);
    is_initialized = true;
    auto index = device.has_index() ? device.index() : current_device;
    return stream_of(new_stream(Device(kFake, index)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    Lock lock(mutex);
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = state_of(stream).number;
    return before;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& on, DeviceIndex, c10::EventFlag) const override {
    Lock lock(mutex);
    auto& stream = state_of(on);
    auto time = std::make_shared<double>(-1.0);
    auto tick = issue(stream, [time] {
      auto now = std::chrono::steady_clock::now().time_since_epoch();
      *time = std::chrono::duration<double, std::milli>(now).count();
    });
    delete static_cast<Event*>(*event);
    *event = new Event{&stream, tick, stream.seen, time};
  }
  void block(void* event, const c10::Stream& waiting) const override {
    if (event == nullptr) return;
    Lock lock(mutex);
    auto recorded = *static_cast<Event*>(event);
    auto& stream = state_of(waiting);
    stream.seen.join(recorded.seen);
    issue(stream, [recorded] { reach(*recorded.stream, recorded.tick); });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    Lock lock(mutex);
    auto& recorded = *static_cast<Event*>(event);
    if (recorded.stream->executed < recorded.tick) return false;
    done.join(recorded.seen);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    Lock lock(mutex);
    auto& recorded = *static_cast<Event*>(event);
    if (recorded.stream->executed < recorded.tick) count_wait();
    reach(*recorded.stream, recorded.tick);
    done.join(recorded.seen);
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(mutex);
    return state_of(stream).tasks.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(mutex);
    finish(state_of(stream));
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    Lock lock(mutex);
    auto count = streams.size();
    for (size_t n = 0; n < count; ++n)
      if (streams[n]->device.index() == index) finish(*streams[n]);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    allocator.recordStream(pointer, stream);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    Lock lock(mutex);
    auto start = *static_cast<Event*>(first)->milliseconds;
    auto end = *static_cast<Event*>(second)->milliseconds;
    TORCH_CHECK(start >= 0 && end >= 0, "fake: a stream has not come to both events.");
    return end - start;
  }
};

struct FakeHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generators().at(index < 0 ? current_device : index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<FakeGenerator>(index < 0 ? current_device : index);
  }
  bool isPinnedPtr(const void* address) const override {
    Lock lock(mutex);
    return find_in(pinned_blocks, address) != nullptr;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void* address) const override {
    Lock lock(mutex);
    auto block = find_in(blocks, address);
    TORCH_CHECK(block != nullptr, "fake: no device has this memory.");
    return Device(kFake, block->device);
  }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex index) const override { current_device = index; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return std::exchange(current_device, index < 0 ? current_device : index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    Lock lock(mutex);
    c10::DeviceGuard guard(storage.device());
    finish(current(storage.device()));
    auto memory = allocator.allocate(num_bytes);
    std::memcpy(memory.get(), storage.data(), std::min(num_bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
  }
};

bool is_fake(const at::TensorBase& tensor) { return tensor.defined() && tensor.device().type() == kFake; }

std::shared_ptr<Block> block_of(const at::Tensor& tensor) {
  return find_in(blocks, tensor.storage().data());
}

// A tensor in main memory with the geometry of another one.
at::Tensor with_geometry(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// A view of a tensor with the geometry of another one. In inference mode it is what its base is.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

c10::Storage as_cpu_storage(const c10::Storage& storage) {
  auto data = c10::DataPtr(storage.mutable_data(), c10::kCPU);
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true));
}

// The same memory as a tensor of the processor.
at::Tensor as_cpu(const at::Tensor& tensor) {
  return with_geometry(as_cpu_storage(tensor.storage()), tensor, c10::DispatchKey::CPU);
}

// One call of an operator: it runs on the processor, in the memory of the device.
struct Call {
  explicit Call(const c10::OperatorHandle& op) : op(op), name(op.schema().name()) {
    const auto& schema = op.schema();
    for (const auto& argument : schema.arguments())
      writes |= argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    for (const auto& result : schema.returns()) {
      is_view |= result.alias_info() != nullptr && !writes;
      tells_host |= !result.type()->isSubtypeOf(*c10::TensorType::get()) &&
          result.type()->kind() != c10::TypeKind::ListType;
    }
    takes_host_indices = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0 ||
        name.rfind("aten::_unsafe_index", 0) == 0;
  }

  const c10::OperatorHandle& op;
  std::string name;
  bool writes = false, is_view = false, tells_host = false, takes_host_indices = false;
  std::optional<Device> device;
  std::vector<std::pair<at::Tensor, at::Tensor>> given;  // tensors of the device, and as CPU tensors
  std::vector<bool> is_written;
  std::unordered_map<c10::StorageImpl*, c10::Storage> cpu_storages;

  at::Tensor enter(const at::Tensor& tensor, bool written, bool in_list) {
    if (!is_fake(tensor)) {
      TORCH_CHECK(
          !tensor.defined() || (tensor.dim() == 0 && !in_list) || takes_host_indices,
          "fake: ", name, " expected all tensors to be on the same device, and found one on ",
          tensor.device(), ".");
      needs_host_mask(tensor);
      return tensor;
    }
    TORCH_CHECK(
        !device || *device == tensor.device(), "fake: ", name,
        " expected all tensors to be on the same device, and found ", *device, " and ",
        tensor.device(), ".");
    device = tensor.device();
    needs_host_mask(tensor);
    auto impl = tensor.storage().unsafeGetStorageImpl();
    if (!cpu_storages.count(impl)) cpu_storages.emplace(impl, as_cpu_storage(tensor.storage()));
    auto cpu = with_geometry(cpu_storages.at(impl), tensor, c10::DispatchKey::CPU);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      cpu.unsafeGetTensorImpl()->set_wrapped_number(true);
    given.emplace_back(tensor, cpu);
    is_written.push_back(written);
    return cpu;
  }

  // The host must know how many elements a mask picks.
  void needs_host_mask(const at::Tensor& tensor) {
    if (takes_host_indices && tensor.defined() && !given.empty() && tensor.scalar_type() == at::kBool)
      tells_host = true;
  }

  IValue entered(const IValue& value, const c10::Argument& argument) {
    bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (value.isTensor()) return enter(value.toTensor(), written, false);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& each : value.toTensorVector()) list.push_back(enter(each, written, true));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& each : value.toOptionalTensorVector())
        list.push_back(each ? std::optional(enter(*each, written, true)) : each);
      return list;
    }
    if (value.isDevice()) {
      device = value.toDevice();
      return Device(c10::kCPU);
    }
    if (value.isGenerator()) return inner_of(value.toGenerator());
    return value;
  }

  bool draws() const { return op.hasTag(at::Tag::nondeterministic_seeded); }

  at::Tensor left(const at::Tensor& result) {
    if (!result.defined()) return result;
    for (const auto& [fake, cpu] : given)
      if (cpu.is_same(result)) return fake;
    for (const auto& [fake, cpu] : given)
      if (cpu.storage().is_alias_of(result.storage())) return view_of(fake, result);
    auto num_bytes = result.storage().nbytes();
    c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), num_bytes, moved_in(result), &allocator, true));
    return with_geometry(storage, result, c10::DispatchKey::PrivateUse1);
  }

  // New memory of the device with what the processor has computed.
  c10::DataPtr moved_in(const at::Tensor& result) {
    auto num_bytes = result.storage().nbytes();
    auto data = allocator.allocate(num_bytes);
    if (num_bytes > 0) {
      std::memcpy(data.get(), result.storage().data(), num_bytes);
      use(*find_in(blocks, data.get()), current(*device), true, name);
    }
    return data;
  }

  IValue left(const IValue& value) {
    if (value.isTensor()) return left(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const auto& each : value.toTensorVector()) list.push_back(left(each));
    return list;
  }

  // What an operator has changed of a tensor besides its numbers: its geometry, or its memory.
  void follow_geometry() {
    for (size_t n = 0; n < given.size(); ++n) {
      const auto& [fake, cpu] = given[n];
      auto storage = fake.storage().unsafeGetStorageImpl();
      if (is_written[n] && cpu.storage().data() != storage->data()) {
        storage->set_data_ptr(moved_in(cpu));
        storage->set_nbytes(cpu.storage().nbytes());
      }
      if (is_written[n] && (fake.sizes() != cpu.sizes() || fake.strides() != cpu.strides()))
        fake.unsafeGetTensorImpl()->set_sizes_and_strides(
            cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }

  void run(torch::jit::Stack* stack) {
    const auto& arguments = op.schema().arguments();
    auto first = stack->size() - arguments.size();
    for (size_t n = 0; n < arguments.size(); ++n)
      (*stack)[first + n] = entered((*stack)[first + n], arguments[n]);
    TORCH_CHECK(device.has_value(), "fake: ", name, " names no device.");
    c10::DeviceGuard guard(*device);
    device = Device(kFake, current_device);
    auto& stream = current(*device);
    if (!is_view) {
      for (size_t n = 0; n < given.size(); ++n)
        if (auto block = block_of(given[n].first)) use(*block, stream, is_written[n], name);
      reach(stream, stream.issued);
    }
    draw_from_device([&] { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack); });
    if (tells_host || (op.hasTag(at::Tag::dynamic_output_shape) && !takes_host_indices)) finish(stream);
    auto num_results = op.schema().returns().size();
    for (size_t n = stack->size() - num_results; n < stack->size(); ++n)
      (*stack)[n] = left((*stack)[n]);
    follow_geometry();
    if (!is_view) {
      stream.seen.note(stream.number, ++stream.issued);
      stream.executed = stream.issued;
    }
  }

  // Without a generator of its own, an operator draws from the default one of its device.
  void draw_from_device(const std::function<void()>& draw) {
    if (!draws()) return draw();
    auto processor = at::detail::getDefaultCPUGenerator();
    auto& inner = inner_of(default_generators().at(device->index()));
    auto before = processor.get_state();
    processor.set_state(inner.get_state());
    draw();
    inner.set_state(processor.get_state());
    processor.set_state(before);
  }
};

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  // The end of a tensor may take Python's lock, so arguments end after the mutex is free.
  std::vector<IValue> arguments(stack->end() - op.schema().arguments().size(), stack->end());
  Lock lock(mutex);
  at::AutoDispatchBelowADInplaceOrView below;
  raise_faults();
  Call(op).run(stack);
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

// The pinned memory that a copy may use by itself, if both ends have one geometry.
std::shared_ptr<Pinned> pinned_of(const at::Tensor& host, const at::Tensor& other) {
  bool is_plain = host.is_contiguous() && other.is_contiguous() && host.sizes() == other.sizes() &&
      host.scalar_type() == other.scalar_type();
  return is_plain ? find_in(pinned_blocks, host.data_ptr()) : nullptr;
}

// Queues a copy from or to pinned memory.
void queue_copy(
    StreamState& stream, std::shared_ptr<Block> block, std::shared_ptr<Pinned> pinned,
    const at::Tensor& host, void* target, const void* source) {
  // torch's own allocators learn of a copy by the storage of its tensor.
  int unrecorded = host.storage().data_ptr().get_deleter() == &free_pinned ? 0 : 1;
  pinned->queued_unrecorded += unrecorded;
  auto num_bytes = host.nbytes();
  issue(stream, [=] {
    std::memcpy(target, source, num_bytes);
    pinned->queued_unrecorded -= unrecorded;
    (void)block;
  });
}

void copy_in(const at::Tensor& target, const at::Tensor& host, bool non_blocking) {
  auto& stream = current(target.device());
  auto block = block_of(target);
  use(*block, stream, true, "a copy in");
  auto pinned = non_blocking ? pinned_of(host, target) : nullptr;
  if (pinned) {
    queue_copy(stream, block, pinned, host, target.data_ptr(), host.data_ptr());
    return;
  }
  // Pageable memory is read before the call returns.
  auto read = host.to(target.scalar_type()).expand(target.sizes()).clone();
  auto there = as_cpu(target);
  issue(stream, [=] {
    at::AutoDispatchBelowADInplaceOrView below;
    there.copy_(read);
    (void)block;
  });
  if (!non_blocking) finish(stream);
}

void copy_out(const at::Tensor& host, const at::Tensor& source, bool non_blocking) {
  auto& stream = current(source.device());
  auto block = block_of(source);
  use(*block, stream, false, "a copy out");
  auto pinned = non_blocking ? pinned_of(host, source) : nullptr;
  if (pinned) {
    queue_copy(stream, block, pinned, host, host.data_ptr(), source.data_ptr());
    return;
  }
  stream.seen.note(stream.number, ++stream.issued);
  finish(stream);
  stream.executed = stream.issued;
  host.copy_(as_cpu(source));
}

void copy_within(const at::Tensor& target, const at::Tensor& source) {
  auto &reading = current(source.device()), &writing = current(target.device());
  wait(reading, writing);
  use(*block_of(source), reading, false, "a copy");
  use(*block_of(target), reading, true, "a copy");
  reach(reading, reading.issued);
  as_cpu(target).copy_(as_cpu(source));
  reading.seen.note(reading.number, ++reading.issued);
  reading.executed = reading.issued;
  wait(writing, reading);
}

at::Tensor& copy_(at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  if (target.is_same(source) || target.numel() == 0) return target;
  Lock lock(mutex);
  at::AutoDispatchBelowADInplaceOrView below;
  raise_faults();
  if (is_fake(target) && is_fake(source)) {
    copy_within(target, source);
  } else if (is_fake(target)) {
    copy_in(target, source, non_blocking);
  } else {
    copy_out(target, source, non_blocking);
  }
  return target;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto written = target;
  return copy_(written, source, non_blocking);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  Lock lock(mutex);
  at::AutoDispatchBelowADInplaceOrView below;
  raise_faults();
  auto& stream = current(tensor.device());
  use(*block_of(tensor), stream, false, "item");
  finish(stream);
  return at::_local_scalar_dense(as_cpu(tensor));
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  allocator.recordStream(tensor.storage().data_ptr(), stream);
}

at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, source, 0, {count}, {});
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

std::vector<int64_t> waits_by_thread() {
  Lock lock(mutex);
  std::vector<int64_t> found;
  for (auto [thread, count] : waits) found.insert(found.end(), {thread, count});
  return found;
}

TORCH_LIBRARY(fake_device, m) {
  m.def("waits() -> int[]", waits_by_thread);
  m.def("faults() -> str[]", [] {
    Lock lock(mutex);
    c10::List<std::string> found;
    for (const auto& each : faults) found.push_back(each);
    return found;
  });
  m.def("is_initialized() -> bool", [] { return is_initialized; });
  m.def("num_queued() -> int", [] {
    Lock lock(mutex);
    int64_t count = 0;
    for (const auto& stream : streams) count += static_cast<int64_t>(stream->tasks.size());
    return count;
  });
  m.def("reset() -> ()", [] {
    Lock lock(mutex);
    waits.clear();
    faults.clear();
    num_raised = 0;
  });
  m.def("get_rng_state(int device) -> Tensor", [](int64_t device) {
    return default_generators().at(device).get_state();
  });
  m.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t device, const at::Tensor& state) {
    default_generators().at(device).set_state(state);
  });
  m.def("manual_seed(int device, int seed) -> ()", [](int64_t device, int64_t seed) {
    default_generators().at(device).set_current_seed(static_cast<uint64_t>(seed));
  });
}

struct Registration {
  Registration() {
    for (DeviceIndex n = 0; n < kDevices; ++n) new_stream(Device(kFake, n));
    c10::SetAllocator(kFake, &allocator);
    at::RegisterPrivateUse1HooksInterface(new FakeHooks());
  }
} registration;

C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuard);

}  // namespace
