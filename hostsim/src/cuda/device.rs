//! Devices: a legacy default stream and the streams created on it.
//!
//! All devices share the machine's memory and processors. They exist so that programs that pick a device per rank
//! behave as they do on GPUs, even with several ranks in one process.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};

use super::error::{CudaError, boundary, cudaError_t, store};
use super::queue::{Job, Kind, Stream, Ticket, refuse_on_worker};

/// The CUDA version that the stand-ins report, in CUDA's encoding.
const CUDA_VERSION: c_int = 13000;
const DEFAULT_DEVICES: usize = 16;
const MAX_DEVICES: usize = 1024;

/// One device.
pub(crate) struct Device {
    pub(crate) index: usize,
    streams: Mutex<Streams>,
    /// Write-locked by a call that synchronizes the device; calls that enqueue wait for it, as in CUDA's driver.
    calls: RwLock<()>,
    /// How often the device was reset.
    pub(crate) resets: AtomicU64,
}

#[derive(Default)]
struct Streams {
    legacy: Option<Arc<Stream>>,
    created: Vec<Arc<Stream>>,
}

impl Device {
    /// The legacy default stream, started at first use.
    pub(crate) fn legacy(&self) -> Result<Arc<Stream>, CudaError> {
        let mut streams = self.streams.lock();
        if let Some(legacy) = &streams.legacy {
            return Ok(Arc::clone(legacy));
        }
        let legacy = Stream::start(self.index, Kind::Legacy)?;
        streams.legacy = Some(Arc::clone(&legacy));
        Ok(legacy)
    }

    /// Creates a stream on this device.
    pub(crate) fn create_stream(&self, kind: Kind) -> Result<Arc<Stream>, CudaError> {
        let created = Stream::start(self.index, kind)?;
        let mut streams = self.streams.lock();
        streams.created.retain(|stream| !stream.retired());
        streams.created.push(Arc::clone(&created));
        Ok(created)
    }

    /// Submits work to a stream of this device, after the given tickets and in the order that the legacy default stream
    /// requires. One lock for all streams of the device defines a common order of submission.
    pub(crate) fn submit(&self, stream: &Arc<Stream>, after: Vec<Ticket>, job: Job) -> Result<Ticket, CudaError> {
        self.take_turn()?;
        Ok(self.submit_in_turn(stream, after, job))
    }

    /// The same after [`Device::take_turn`].
    pub(crate) fn submit_in_turn(&self, stream: &Arc<Stream>, mut after: Vec<Ticket>, job: Job) -> Ticket {
        let streams = self.streams.lock();
        match stream.kind {
            Kind::Legacy => {
                let blocking = streams.created.iter().filter(|other| other.kind == Kind::Blocking);
                after.extend(blocking.filter_map(Stream::pending));
            }
            Kind::Blocking => after.extend(streams.legacy.as_ref().and_then(Stream::pending)),
            Kind::NonBlocking => {}
        }
        stream.push(after, job)
    }

    /// Waits for all streams of the device; returns the first error found, once.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        refuse_on_worker()?;
        self.streams().iter().map(Stream::drain).fold(Ok(()), Result::and)
    }

    /// Synchronizes the device like a call that frees: calls that enqueue or destroy streams wait meanwhile.
    pub(crate) fn come_to_rest(&self) -> Result<(), CudaError> {
        refuse_on_worker()?;
        let _alone = self.calls.write();
        let tickets: Vec<_> = self.streams().iter().filter_map(Stream::pending).collect();
        tickets.iter().for_each(Ticket::wait);
        Ok(())
    }

    /// Waits until no call is synchronizing the device.
    pub(crate) fn take_turn(&self) -> Result<(), CudaError> {
        refuse_on_worker()?;
        drop(self.calls.read());
        Ok(())
    }

    fn streams(&self) -> Vec<Arc<Stream>> {
        let streams = self.streams.lock();
        streams.created.iter().chain(&streams.legacy).cloned().collect()
    }

    /// Closes all streams of the device, including the legacy default stream.
    pub(crate) fn close_streams(&self) {
        let gone = std::mem::take(&mut *self.streams.lock());
        gone.created.iter().chain(&gone.legacy).for_each(|stream| stream.close());
    }
}

/// Submits work to a stream, see [`Device::submit`].
pub(crate) fn submit(stream: &Arc<Stream>, after: Vec<Ticket>, job: Job) -> Result<Ticket, CudaError> {
    device(stream.device)?.submit(stream, after, job)
}

/// The device with this index.
pub(crate) fn device(index: usize) -> Result<&'static Device, CudaError> {
    devices().get(index).ok_or(CudaError::InvalidDevice)
}

pub(crate) fn current() -> Result<&'static Device, CudaError> {
    device(current_index())
}

pub(crate) fn current_index() -> usize {
    CURRENT.get()
}

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        (0..device_count(std::env::var("NCCLEP_HOSTSIM_DEVICES").ok().as_deref()))
            .map(|index| Device {
                index,
                streams: Mutex::default(),
                calls: RwLock::default(),
                resets: AtomicU64::default(),
            })
            .collect()
    })
}

fn device_count(wanted: Option<&str>) -> usize {
    wanted
        .and_then(|text| text.trim().parse().ok())
        .filter(|count| (1..=MAX_DEVICES).contains(count))
        .unwrap_or(DEFAULT_DEVICES)
}

/// Number of devices: `NCCLEP_HOSTSIM_DEVICES`, else 16.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDeviceCount(count: Option<&mut c_int>) -> cudaError_t {
    boundary(|| store(count, devices().len() as c_int))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDevice(index: Option<&mut c_int>) -> cudaError_t {
    boundary(|| store(index, current_index() as c_int))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaSetDevice(index: c_int) -> cudaError_t {
    boundary(|| {
        let index = usize::try_from(index).map_err(|_| CudaError::InvalidDevice)?;
        CURRENT.set(device(index)?.index);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDriverGetVersion(version: Option<&mut c_int>) -> cudaError_t {
    boundary(|| store(version, CUDA_VERSION))
}

/// A property of a device, with the values of a plausible recent GPU, so that code that sizes launches by them takes
/// its usual path.
#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetAttribute(value: Option<&mut c_int>, attribute: c_int, index: c_int) -> cudaError_t {
    boundary(|| {
        let index = usize::try_from(index).map_err(|_| CudaError::InvalidDevice)?;
        device(index)?;
        let answer = attribute_value(attribute, index).ok_or(CudaError::InvalidValue)?;
        store(value, answer)
    })
}

/// Values of `cudaDeviceAttr`.
fn attribute_value(attribute: c_int, device: usize) -> Option<c_int> {
    Some(match attribute {
        1..=3 => 1024,             // MaxThreadsPerBlock, MaxBlockDimX, MaxBlockDimY
        4 => 64,                   // MaxBlockDimZ
        5 => c_int::MAX,           // MaxGridDimX
        6 | 7 => 65535,            // MaxGridDimY, MaxGridDimZ
        8 => 48 << 10,             // MaxSharedMemoryPerBlock
        10 => 32,                  // WarpSize
        12 | 82 => 65536,          // MaxRegistersPerBlock, MaxRegistersPerMultiprocessor
        13 => 1_500_000,           // ClockRate, kHz
        16 => 64,                  // MultiProcessorCount
        18 | 20 => 0,              // Integrated, ComputeMode
        19 | 31 | 40 | 41 => 1,    // CanMapHostMemory, ConcurrentKernels, AsyncEngineCount, UVA
        33 => device as c_int + 1, // PciBusId
        34 | 50 => 0,              // PciDeviceId, PciDomainId
        38 => 32 << 20,            // L2CacheSize
        39 => 2048,                // MaxThreadsPerMultiProcessor
        75 => 9,                   // ComputeCapabilityMajor
        76 => 0,                   // ComputeCapabilityMinor
        81 => 228 << 10,           // MaxSharedMemoryPerMultiprocessor
        78 | 95 | 99 | 115 => 1,   // StreamPriorities, CooperativeLaunch, HostRegister, MemoryPools
        83 | 88 | 89 => 0,         // ManagedMemory, PageableMemoryAccess, ConcurrentManagedAccess
        97 => 227 << 10,           // MaxSharedMemoryPerBlockOptin
        _ => return None,
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaProfilerStart() -> cudaError_t {
    boundary(|| Ok(()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaProfilerStop() -> cudaError_t {
    boundary(|| Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_count_falls_back_to_the_default() {
        assert_eq!(device_count(None), DEFAULT_DEVICES);
        assert_eq!(device_count(Some("4")), 4);
        for bad in ["0", "-1", "many", "99999999"] {
            assert_eq!(device_count(Some(bad)), DEFAULT_DEVICES, "{bad}");
        }
    }
}
