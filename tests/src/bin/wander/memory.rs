//! Memory of all kinds: how it comes and goes, what it should hold, and what the driver says of its addresses.

use crate::call;
use crate::calls::{Status, Trouble, same, same_bytes};
use mpsshim_api::cuda::*;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_uint, c_void};
use std::ptr::null_mut;

/// Unit of virtual memory; a multiple of every device's granularity.
pub const UNIT: usize = 2 << 20;

#[derive(Clone, Copy, Debug)]
pub enum Origin {
    Device,
    /// From a pool; freed in a stream.
    Pool,
    Host,
    /// A mapping of the program's, from `start` on, with so many bytes.
    Registered {
        start: usize,
        len: usize,
    },
    Managed,
    /// A reservation, mapped as often as the buffer has views; the handle if it was kept.
    Virtual {
        reserved: CUdeviceptr,
        len: usize,
        handle: Option<CUmemGenericAllocationHandle>,
    },
    /// Of an image.
    Variable {
        image: u32,
        name: &'static CStr,
    },
}

/// Memory with the same content at one or more addresses.
pub struct Buffer {
    pub origin: Origin,
    pub views: Vec<CUdeviceptr>,
    /// Where the processor may access it.
    pub host: Option<*mut u8>,
    /// What it should hold.
    pub content: Vec<u8>,
}

pub type Buffers = BTreeMap<u32, Buffer>;

fn map_private(len: usize) -> usize {
    // SAFETY: a new mapping, which replaces none.
    let start = unsafe {
        libc::mmap(
            null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(start, libc::MAP_FAILED);
    start as usize
}

/// A reservation with so many mappings of one physical block.
fn virtual_memory(len: usize, views: usize, keeps: bool) -> Status<(Origin, Vec<CUdeviceptr>)> {
    let location = CUmemLocation {
        kind: CU_MEM_LOCATION_TYPE_DEVICE,
        id: 0,
    };
    let properties = CUmemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        location,
        ..CUmemAllocationProp::default()
    };
    let mut handle = CUmemGenericAllocationHandle::NULL;
    call!(cuMemCreate, &mut handle, len, &raw const properties, 0u64)?;
    let (mut reserved, reserve): (CUdeviceptr, usize) = (0, len * views);
    call!(
        cuMemAddressReserve,
        &mut reserved,
        reserve,
        0usize,
        0u64,
        0u64
    )?;
    let places: Vec<CUdeviceptr> = (0..views)
        .map(|view| reserved + (view * len) as u64)
        .collect();
    for place in &places {
        call!(cuMemMap, *place, len, 0usize, handle, 0u64)?;
    }
    let access = CUmemAccessDesc {
        location,
        flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    call!(cuMemSetAccess, reserved, reserve, &raw const access, 1usize)?;
    if !keeps {
        call!(cuMemRelease, handle)?;
    }
    let handle = keeps.then_some(handle);
    let len = reserve;
    Ok((
        Origin::Virtual {
            reserved,
            len,
            handle,
        },
        places,
    ))
}

/// How memory is asked for.
#[derive(Clone, Copy, Debug)]
pub enum Ask {
    Device {
        len: usize,
    },
    /// The model has the whole block, with the padding of its rows.
    Pitched {
        width: usize,
        rows: usize,
    },
    Pool {
        len: usize,
        pool: Option<CUmemoryPool>,
        stream: CUstream,
    },
    Host {
        len: usize,
        flags: u32,
    },
    /// `offset` bytes behind the beginning of a page.
    Registered {
        len: usize,
        offset: usize,
    },
    Managed {
        len: usize,
    },
    Virtual {
        units: usize,
        views: usize,
        keeps: bool,
    },
}

impl Buffer {
    /// Memory whose content is not defined yet.
    ///
    /// # Errors
    /// A call's status.
    pub fn new(ask: Ask) -> Status<Buffer> {
        let mut address: CUdeviceptr = 0;
        let device = |origin, address, len| Buffer {
            origin,
            views: vec![address],
            host: None,
            content: vec![0; len],
        };
        match ask {
            Ask::Device { len } => {
                call!(cuMemAlloc_v2, &mut address, len)?;
                Ok(device(Origin::Device, address, len))
            }
            Ask::Pitched { width, rows } => {
                let mut pitch = 0usize;
                let (place, element) = (&mut address, 4 as c_uint);
                call!(cuMemAllocPitch_v2, place, &mut pitch, width, rows, element)?;
                Ok(device(Origin::Device, address, pitch * rows))
            }
            Ask::Pool { len, pool, stream } => {
                match pool {
                    Some(pool) => {
                        call!(cuMemAllocFromPoolAsync, &mut address, len, pool, stream)?;
                    }
                    None => call!(cuMemAllocAsync, &mut address, len, stream)?,
                }
                Ok(device(Origin::Pool, address, len))
            }
            Ask::Host { len, flags } => {
                let mut host = null_mut::<c_void>();
                call!(cuMemHostAlloc, &mut host, len, flags as c_uint)?;
                Buffer::of_host(Origin::Host, host as usize, len)
            }
            Ask::Registered { len, offset } => {
                let mapped = (offset + len).next_multiple_of(4096);
                let start = map_private(mapped);
                let host = (start + offset) as *mut c_void;
                let flags = CU_MEMHOSTREGISTER_DEVICEMAP as c_uint;
                call!(cuMemHostRegister_v2, host, len, flags)?;
                Buffer::of_host(
                    Origin::Registered { start, len: mapped },
                    host as usize,
                    len,
                )
            }
            Ask::Managed { len } => {
                let flags = CU_MEM_ATTACH_GLOBAL as c_uint;
                call!(cuMemAllocManaged, &mut address, len, flags)?;
                Ok(device(Origin::Managed, address, len))
            }
            Ask::Virtual {
                units,
                views,
                keeps,
            } => {
                let len = units * UNIT;
                let (origin, views) = virtual_memory(len, views, keeps)?;
                let content = vec![0; len];
                Ok(Buffer {
                    origin,
                    views,
                    host: None,
                    content,
                })
            }
        }
    }

    fn of_host(origin: Origin, host: usize, len: usize) -> Status<Buffer> {
        let mut buffer = Buffer {
            origin,
            views: Vec::new(),
            host: Some(host as *mut u8),
            content: vec![0; len],
        };
        buffer.views.push(buffer.device_pointer()?);
        Ok(buffer)
    }

    /// Of memory that the processor accesses, its address for devices.
    fn device_pointer(&self) -> Status<CUdeviceptr> {
        let mut address: CUdeviceptr = 0;
        let host = self.host.expect("host memory").cast::<c_void>();
        call!(
            cuMemHostGetDevicePointer_v2,
            &mut address,
            host,
            0 as c_uint
        )?;
        Ok(address)
    }

    pub fn is_variable(&self) -> bool {
        matches!(self.origin, Origin::Variable { .. })
    }

    /// The bytes that the processor sees. Nothing may be in flight that accesses them.
    pub fn bytes(&mut self) -> Option<&mut [u8]> {
        // SAFETY: the memory is the buffer's, lives as long as it does, and nothing is in flight.
        self.host
            .map(|host| unsafe { std::slice::from_raw_parts_mut(host, self.content.len()) })
    }

    /// Gives the memory back, in this stream if it came from a pool. A variable ends with its image.
    ///
    /// # Errors
    /// A call's status.
    pub fn free(self, stream: CUstream) -> Status {
        let address = self.views[0];
        let host = self.host.map_or(null_mut(), <*mut u8>::cast::<c_void>);
        match self.origin {
            Origin::Device | Origin::Managed => call!(cuMemFree_v2, address),
            Origin::Pool => call!(cuMemFreeAsync, address, stream),
            Origin::Host => call!(cuMemFreeHost, host),
            Origin::Registered { start, len } => {
                call!(cuMemHostUnregister, host)?;
                // SAFETY: what it is must stay after the registration; the mapping is the buffer's.
                let seen =
                    unsafe { std::slice::from_raw_parts(host.cast::<u8>(), self.content.len()) };
                same_bytes(
                    || "memory that was unregistered".into(),
                    seen,
                    &self.content,
                )?;
                // SAFETY: as above.
                unsafe { libc::munmap(start as *mut c_void, len) };
                Ok(())
            }
            Origin::Virtual {
                reserved,
                len,
                handle,
            } => {
                for view in &self.views {
                    call!(cuMemUnmap, *view, self.content.len())?;
                }
                if let Some(handle) = handle {
                    call!(cuMemRelease, handle)?;
                }
                call!(cuMemAddressFree, reserved, len)
            }
            Origin::Variable { .. } => Ok(()),
        }
    }

    /// Compares the content, at each address, and what the driver says of the addresses. Nothing may be in flight.
    ///
    /// # Errors
    /// A call's status, or the difference.
    pub fn check(&mut self, number: u32) -> Status {
        let name = format!("buffer {number} ({:?})", self.origin);
        for view in self.views.clone() {
            let mut found = vec![0u8; self.content.len()];
            call!(cuMemcpyDtoH_v2, found.as_mut_ptr(), view, found.len())?;
            same_bytes(|| format!("{name} at {view:#x}"), &found, &self.content)?;
        }
        let expected = std::mem::take(&mut self.content);
        if let Some(host) = self.host {
            // SAFETY: as in `bytes`.
            let seen = unsafe { std::slice::from_raw_parts(host, expected.len()) };
            same_bytes(|| format!("{name}, by the processor"), seen, &expected)?;
        }
        self.content = expected;
        self.check_addresses(&name)
    }

    fn check_addresses(&self, name: &str) -> Status {
        let len = self.content.len();
        for view in &self.views {
            let what = |what: &str| format!("{what} of {name} at {view:#x}");
            let middle = view + len as u64 / 2;
            let kind = match self.origin {
                Origin::Host | Origin::Registered { .. } => CU_MEMORYTYPE_HOST,
                _ => CU_MEMORYTYPE_DEVICE,
            };
            let mut found = 0u32;
            let which = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
            call!(cuPointerGetAttribute, &mut found, which, middle)?;
            same(|| what("memory type"), found, kind)?;
            if matches!(self.origin, Origin::Device | Origin::Pool) {
                let (mut start, mut found): (CUdeviceptr, usize) = (0, 0);
                call!(cuMemGetAddressRange_v2, &mut start, &mut found, middle)?;
                same(|| what("range"), (start, found), (*view, len))?;
            }
        }
        if self.host.is_some() {
            let found = self.device_pointer()?;
            same(|| format!("device pointer of {name}"), found, self.views[0])?;
        }
        Ok(())
    }
}

/// A pool of the program's and the settings that it was given.
pub struct Pool {
    pub pool: CUmemoryPool,
    settings: BTreeMap<u32, u64>,
}

impl Pool {
    /// # Errors
    /// A call's status.
    pub fn new() -> Status<Pool> {
        let properties = CUmemPoolProps {
            kind: CU_MEM_ALLOCATION_TYPE_PINNED,
            location: CUmemLocation {
                kind: CU_MEM_LOCATION_TYPE_DEVICE,
                id: 0,
            },
            ..CUmemPoolProps::default()
        };
        let mut pool = CUmemoryPool::NULL;
        call!(cuMemPoolCreate, &mut pool, &raw const properties)?;
        Ok(Pool {
            pool,
            settings: BTreeMap::new(),
        })
    }

    /// # Errors
    /// A call's status.
    pub fn set_threshold(&mut self, mut bytes: u64) -> Status {
        let which = CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        call!(cuMemPoolSetAttribute, self.pool, which, &raw mut bytes)?;
        self.settings.insert(which, bytes);
        Ok(())
    }

    /// # Errors
    /// A call's status.
    pub fn set_reuse(&mut self, which: u32, allowed: bool) -> Status {
        let mut value = u32::from(allowed);
        call!(cuMemPoolSetAttribute, self.pool, which, &raw mut value)?;
        self.settings.insert(which, u64::from(allowed));
        Ok(())
    }

    /// # Errors
    /// A call's status, or a setting that is not as it was.
    pub fn check(&self) -> Status {
        for (which, expected) in &self.settings {
            let mut found = 0u64;
            call!(cuMemPoolGetAttribute, self.pool, *which, &raw mut found)?;
            same(|| format!("attribute {which} of a pool"), found, *expected)?;
        }
        Ok(())
    }
}

/// The driver refuses addresses of memory that is not there any more.
///
/// # Errors
/// A status that is not the expected one.
pub fn is_gone(address: CUdeviceptr) -> Status {
    let mut found = 0u32;
    let which = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    match mpsshim_tests::cu!(cuPointerGetAttribute, &mut found, which, address) {
        CUDA_ERROR_INVALID_VALUE => Ok(()),
        CUDA_SUCCESS => Err(Trouble::Wrong(format!("{address:#x} is still there"))),
        status => Err(Trouble::Call("cuPointerGetAttribute", status)),
    }
}
