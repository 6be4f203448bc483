//! Green contexts, resources of multiprocessors, and a context that may be confined to a part of the device.

use super::{Status, memory, submit};
use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use mpsshim_tests::peer::WHERE_PTX;
use std::ffi::{CString, c_void};

const BLOCKS: u32 = 4096;
/// Launches until a kernel has run on all multiprocessors.
const TIMES: u32 = 200;
/// More than any device has multiprocessors.
const MOST: usize = 1024;

/// A kernel that notes where it runs.
#[derive(Clone, Copy)]
struct Probe {
    kernel: CUfunction,
    out: CUdeviceptr,
}

impl Probe {
    /// In the current context.
    fn new() -> Status<Probe> {
        let text = CString::new(WHERE_PTX).expect("no NUL");
        let mut module = CUmodule::NULL;
        cu!(cuModuleLoadData, &mut module, text.as_ptr()).ok()?;
        let mut kernel = CUfunction::NULL;
        cu!(cuModuleGetFunction, &mut kernel, module, c"where".as_ptr()).ok()?;
        let out = memory(4 * MOST)?;
        Ok(Probe { kernel, out })
    }

    /// The number of multiprocessors on which a kernel runs, that is launched again until there are as many as expected: other
    /// programs may occupy some.
    fn count(self, stream: CUstream, expected: u32) -> Status<u32> {
        let mut out = self.out;
        cu!(cuMemsetD32Async, out, 0u32, MOST, stream).ok()?;
        let mut params = [(&raw mut out).cast::<c_void>()];
        let mut count = 0;
        for _ in 0..TIMES {
            submit(self.kernel, (BLOCKS, 32), stream, &mut params)?;
            cu!(cuStreamSynchronize, stream).ok()?;
            let mut seen = vec![0u32; MOST];
            cu!(cuMemcpyDtoH_v2, seen.as_mut_ptr(), out, 4 * MOST).ok()?;
            count = seen.iter().sum();
            if count >= expected {
                break;
            }
        }
        Ok(count)
    }
}

fn of_device() -> Status<CUdevResource> {
    let mut resource = CUdevResource::INVALID;
    let kind = CU_DEV_RESOURCE_TYPE_SM;
    cu!(cuDeviceGetDevResource, 0 as CUdevice, &mut resource, kind).ok()?;
    Ok(resource)
}

/// Two groups of a resource, and the rest.
fn split(of: &CUdevResource, least: u32) -> Status<[CUdevResource; 3]> {
    let mut groups = [CUdevResource::INVALID; 2];
    let mut rest = CUdevResource::INVALID;
    let mut count = 2u32;
    cu!(
        cuDevSmResourceSplitByCount,
        groups.as_mut_ptr(),
        &mut count,
        of,
        &mut rest,
        0u32,
        least
    )
    .ok()?;
    assert_eq!(count, 2);
    Ok([groups[0], groups[1], rest])
}

fn described(resources: &mut [CUdevResource]) -> Status<u64> {
    let mut description = 0u64;
    let count = resources.len() as u32;
    cu!(
        cuDevResourceGenerateDesc,
        &mut description,
        resources.as_mut_ptr(),
        count
    )
    .ok()?;
    Ok(description)
}

/// A green context, and a stream in it.
#[derive(Clone, Copy)]
struct Green(u64, CUstream);

impl Green {
    fn new(description: u64) -> Status<Green> {
        let mut green = 0u64;
        cu!(
            cuGreenCtxCreate,
            &mut green,
            description,
            0 as CUdevice,
            CU_GREEN_CTX_DEFAULT_STREAM
        )
        .ok()?;
        let mut stream = CUstream::NULL;
        let flags = CU_STREAM_NON_BLOCKING;
        cu!(cuGreenCtxStreamCreate, &mut stream, green, flags, 0i32).ok()?;
        Ok(Green(green, stream))
    }

    fn resource(self) -> Status<CUdevResource> {
        let mut resource = CUdevResource::INVALID;
        let kind = CU_DEV_RESOURCE_TYPE_SM;
        cu!(cuGreenCtxGetDevResource, self.0, &mut resource, kind).ok()?;
        Ok(resource)
    }

    fn end(self) -> Status {
        cu!(cuStreamDestroy_v2, self.1).ok()?;
        cu!(cuGreenCtxDestroy, self.0).ok()
    }
}

/// A further context, which is confined if the environment says so.
struct Further {
    context: CUcontext,
    stream: CUstream,
    probe: Probe,
    count: u32,
}

impl Further {
    fn new() -> Status<Further> {
        let mut context = CUcontext::NULL;
        cu!(cuCtxCreate_v2, &mut context, 0u32, 0 as CUdevice).ok()?;
        let mut stream = CUstream::NULL;
        cu!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING).ok()?;
        let mut affinity = [0u32; 2];
        cu!(cuCtxGetExecAffinity, affinity.as_mut_ptr(), 0u32).ok()?;
        let probe = Probe::new()?;
        let mut left = CUcontext::NULL;
        cu!(cuCtxPopCurrent_v2, &mut left).ok()?;
        Ok(Further {
            context,
            stream,
            probe,
            count: affinity[1],
        })
    }

    fn is_right(&self) -> Status<bool> {
        cu!(cuCtxPushCurrent_v2, self.context).ok()?;
        let (seen, by_default) = (
            self.probe.count(self.stream, self.count)?,
            self.probe.count(CUstream::NULL, self.count)?,
        );
        let mut resource = CUdevResource::INVALID;
        let kind = CU_DEV_RESOURCE_TYPE_SM;
        cu!(cuCtxGetDevResource, self.context, &mut resource, kind).ok()?;
        let mut left = CUcontext::NULL;
        cu!(cuCtxPopCurrent_v2, &mut left).ok()?;
        Ok([seen, by_default, resource.sm[0]] == [self.count; 3])
    }
}

/// Its objects, and the sizes that they should have.
pub struct Parts {
    probe: Probe,
    whole: CUdevResource,
    group: CUdevResource,
    rest: CUdevResource,
    /// The group and the rest.
    description: u64,
    green: Green,
    /// One more, made anew each round.
    changing: Green,
    /// What a green context has had that was destroyed.
    left: CUdevResource,
    further: Further,
    round: u32,
}

impl Parts {
    /// # Errors
    /// A call's status.
    pub fn new() -> Status<Parts> {
        let whole = of_device()?;
        let [group, _, rest] = split(&whole, whole.sm[0] / 4)?;
        let description = described(&mut [group, rest])?;
        let gone = Green::new(description)?;
        let left = gone.resource()?;
        gone.end()?;
        Ok(Parts {
            probe: Probe::new()?,
            whole,
            group,
            rest,
            description,
            green: Green::new(description)?,
            changing: Green::new(described(&mut [group])?)?,
            left,
            further: Further::new()?,
            round: 0,
        })
    }

    fn is_right(&self) -> Status<bool> {
        let (of_green, of_changing) = (self.group.sm[0] + self.rest.sm[0], self.group.sm[0]);
        let sizes = [
            (self.probe.count(self.green.1, of_green)?, of_green),
            (self.green.resource()?.sm[0], of_green),
            (self.left.sm[0], of_green),
            (self.changing.resource()?.sm[0], self.size_of_changing()),
            (
                self.probe.count(self.changing.1, self.size_of_changing())?,
                self.size_of_changing(),
            ),
            (of_device()?.sm[0], self.whole.sm[0]),
            (
                split(&self.left, 1)?[0].sm[0],
                split(&self.green.resource()?, 1)?[0].sm[0],
            ),
            (split(&self.whole, of_changing)?[0].sm[0], of_changing),
        ];
        let is_same = sizes.iter().all(|(now, before)| now == before);
        Ok(is_same && self.further.is_right()?)
    }

    fn size_of_changing(&self) -> u32 {
        match self.round % 2 {
            0 => self.group.sm[0],
            _ => self.group.sm[0] + self.rest.sm[0],
        }
    }

    /// The number of rounds, or `None` if something has not the multiprocessors that it had.
    ///
    /// # Errors
    /// A call's status.
    pub fn round(&mut self) -> Status<Option<u32>> {
        if !self.is_right()? {
            return Ok(None);
        }
        self.round += 1;
        self.changing.end()?;
        self.changing = match self.round % 2 {
            0 => Green::new(described(&mut [self.group])?)?,
            _ => Green::new(self.description)?,
        };
        let right = self.is_right()?;
        cu!(cuCtxSynchronize).ok()?;
        Ok(right.then_some(self.round))
    }
}
