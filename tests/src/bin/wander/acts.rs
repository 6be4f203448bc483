//! Work for streams and graphs: how it is submitted, and what it does to memory.

use crate::call;
use crate::calls::Status;
use crate::images::{Image, Kernel, SHOWN, TABLE};
use crate::memory::Buffers;
use crate::random::Random;
use mpsshim_api::cuda::*;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

pub type Images = BTreeMap<u32, Image>;

/// An address: a buffer, one of its views, and an offset.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub buffer: u32,
    pub view: usize,
    pub at: usize,
}

impl Place {
    pub fn address(self, buffers: &Buffers) -> CUdeviceptr {
        buffers[&self.buffer].views[self.view] + self.at as u64
    }
}

/// Rows of bytes.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    pub width: usize,
    pub rows: usize,
}

#[derive(Clone, Debug)]
pub enum Act {
    /// `width` of `rows` is in elements.
    Set {
        to: Place,
        pitch: usize,
        element: usize,
        value: u32,
        size: Rows,
    },
    Copy {
        to: Place,
        to_pitch: usize,
        from: Place,
        from_pitch: usize,
        size: Rows,
        way: Way,
    },
    Launch(Launch),
    /// The program's function writes bytes that follow from the seed.
    Host {
        to: Place,
        len: usize,
        seed: u64,
    },
    Empty,
    Child(Vec<Act>),
}

/// The call for a copy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    /// By the kinds of both sides, such as `cuMemcpyHtoD`.
    Typed,
    Unified,
    Peer,
}

#[derive(Clone, Debug)]
pub struct Launch {
    pub image: u32,
    pub kernel: Kernel,
    /// The target, then the sources.
    pub places: Vec<Place>,
    /// Words to write.
    pub count: u32,
    pub block: u32,
    pub a: u32,
    pub b: u32,
    pub by: By,
}

/// How parameters are given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum By {
    Pointers,
    Buffer,
    Ex,
}

/// A kernel's parameters, each in words of its own, and their sizes.
struct Params {
    words: Vec<u64>,
    sizes: Vec<usize>,
}

impl Params {
    fn pointers(&mut self) -> Vec<*mut c_void> {
        let mut at = 0;
        let mut found = Vec::new();
        for size in &self.sizes {
            found.push((&raw mut self.words[at]).cast());
            at += size.div_ceil(8);
        }
        found
    }

    /// As a buffer: each parameter at its alignment.
    fn packed(&self) -> Vec<u8> {
        let (mut packed, mut at): (Vec<u8>, usize) = (Vec::new(), 0);
        for size in &self.sizes {
            packed.resize(packed.len().next_multiple_of((*size).min(8)), 0);
            let bytes = self.words[at..].iter().flat_map(|word| word.to_le_bytes());
            packed.extend(bytes.take(*size));
            at += size.div_ceil(8);
        }
        packed
    }
}

impl Launch {
    pub fn grid(&self) -> u32 {
        self.count.div_ceil(self.block)
    }

    fn shared(&self) -> u32 {
        match self.kernel {
            Kernel::Reverse => 4 * self.block,
            _ => 0,
        }
    }

    fn params(&self, buffers: &Buffers) -> Params {
        let at: Vec<u64> = self
            .places
            .iter()
            .map(|place| place.address(buffers))
            .collect();
        let (count, a, b) = (u64::from(self.count), u64::from(self.a), u64::from(self.b));
        let (words, sizes) = match self.kernel {
            Kernel::Fill => (vec![at[0], count, a, b], vec![8, 4, 4, 4]),
            Kernel::Add => (vec![at[0], count, a], vec![8, 4, 4]),
            Kernel::Copy => (vec![at[0], count, at[1]], vec![8, 4, 8]),
            Kernel::Sum => (vec![at[0], count, at[1], at[2]], vec![8, 4, 8, 8]),
            Kernel::Record => (vec![at[0], count | a << 32, b], vec![24]),
            Kernel::Reverse | Kernel::Show => (vec![at[0]], vec![8]),
            Kernel::Count | Kernel::Mark => (vec![a], vec![4]),
        };
        Params { words, sizes }
    }

    fn submit(&self, stream: CUstream, buffers: &Buffers, images: &Images) -> Status {
        let mut params = self.params(buffers);
        let mut pointers = params.pointers();
        let function = images[&self.image].function(self.kernel);
        let nothing = null_mut::<*mut c_void>();
        let (grid, block, shared) = (self.grid(), self.block, self.shared());
        if self.by == By::Ex {
            let config = CUlaunchConfig {
                grid: [grid, 1, 1],
                block: [block, 1, 1],
                shared_mem_bytes: shared,
                stream,
                attrs: null(),
                num_attrs: 0,
            };
            let pointers = pointers.as_mut_ptr();
            return call!(
                cuLaunchKernelEx,
                &raw const config,
                function,
                pointers,
                nothing
            );
        }
        let packed = params.packed();
        let mut size = packed.len();
        let mut extra: [*mut c_void; 5] = [
            CU_LAUNCH_PARAM_BUFFER_POINTER as *mut c_void,
            packed.as_ptr().cast_mut().cast(),
            CU_LAUNCH_PARAM_BUFFER_SIZE as *mut c_void,
            (&raw mut size).cast(),
            CU_LAUNCH_PARAM_END as *mut c_void,
        ];
        let (pointers, extra) = match self.by {
            By::Buffer => (nothing, extra.as_mut_ptr()),
            _ => (pointers.as_mut_ptr(), nothing),
        };
        call!(
            cuLaunchKernel,
            function,
            grid,
            1u32,
            1u32,
            block,
            1u32,
            1u32,
            shared,
            stream,
            pointers,
            extra
        )
    }

    /// Calls the function with the parameters in the form that a graph's nodes have.
    pub fn with_node<T>(
        &self,
        buffers: &Buffers,
        images: &Images,
        use_it: impl FnOnce(*const CUDA_KERNEL_NODE_PARAMS) -> T,
    ) -> T {
        let mut params = self.params(buffers);
        let mut pointers = params.pointers();
        let image = &images[&self.image];
        let (function, by_handle) = (image.function(self.kernel).0, image.has_kernels);
        let node = CUDA_KERNEL_NODE_PARAMS {
            function: if by_handle { 0 } else { function },
            kernel: if by_handle { function } else { 0 },
            grid: [self.grid(), 1, 1],
            block: [self.block, 1, 1],
            shared: self.shared(),
            params: pointers.as_mut_ptr() as u64,
            ..CUDA_KERNEL_NODE_PARAMS::default()
        };
        use_it(&raw const node)
    }

    fn apply(&self, buffers: &mut Buffers, images: &Images) {
        let variables = images[&self.image].variables.clone();
        let count = self.count as usize;
        let read = |buffers: &Buffers, place: Place, count: usize| -> Vec<u32> {
            let content = &buffers[&place.buffer].content[place.at..];
            words(&content[..4 * count])
        };
        let own = |buffers: &Buffers| -> Vec<u32> {
            let all = variables.iter().take(3);
            all.flat_map(|variable| words(&buffers[variable].content))
                .collect()
        };
        let source = |at: usize| read(buffers, self.places[at], count);
        let index = 0..self.count;
        let (a, b) = (self.a, self.b);
        let value: Vec<u32> = match self.kernel {
            Kernel::Fill => index.map(|i| i.wrapping_mul(b).wrapping_add(a)).collect(),
            Kernel::Add => source(0).iter().map(|word| word.wrapping_add(a)).collect(),
            Kernel::Copy => source(1),
            Kernel::Sum => {
                let both = source(1).into_iter().zip(source(2));
                both.map(|(first, second)| first.wrapping_add(second))
                    .collect()
            }
            Kernel::Record => index.map(|i| i.wrapping_mul(a) ^ b).collect(),
            Kernel::Reverse => {
                let before = source(0);
                let blocks = before.chunks(self.block as usize);
                blocks
                    .flat_map(|block| block.iter().rev().copied())
                    .collect()
            }
            Kernel::Show => own(buffers),
            Kernel::Count => {
                vec![own(buffers)[0].wrapping_add(a.wrapping_mul(self.grid() * self.block))]
            }
            Kernel::Mark => (0..TABLE as u32 / 4).map(|i| a.wrapping_add(i)).collect(),
        };
        let (buffer, at) = match self.kernel {
            Kernel::Count => (variables[0], 0),
            Kernel::Mark => (variables[1], 0),
            _ => (self.places[0].buffer, self.places[0].at),
        };
        let content = &mut buffers.get_mut(&buffer).expect("a buffer").content;
        for (to, word) in content[at..].chunks_exact_mut(4).zip(value) {
            to.copy_from_slice(&word.to_le_bytes());
        }
    }
}

fn words(bytes: &[u8]) -> Vec<u32> {
    let parts = bytes.chunks_exact(4);
    parts
        .map(|part| u32::from_le_bytes(part.try_into().expect("four")))
        .collect()
}

/// What a host function writes, and where.
struct Writing {
    to: *mut u8,
    len: usize,
    seed: u64,
    /// A graph calls it again.
    stays: bool,
}

extern "C" fn write(data: *mut c_void) {
    // SAFETY: the data of a host function of this program, which lives until the function has run.
    let writing = unsafe { &*data.cast::<Writing>() };
    let bytes = Random::new(writing.seed).bytes(writing.len);
    // SAFETY: the buffer lives until its work is done, and nothing else accesses it meanwhile.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), writing.to, writing.len) };
    if !writing.stays {
        // SAFETY: it is called once, and the box was given up for that.
        drop(unsafe { Box::from_raw(data.cast::<Writing>()) });
    }
}

/// How an operation is submitted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    Stream,
    /// By the call that has no stream and may wait.
    Plain,
    /// Into a graph, which may do it several times.
    Capture,
}

/// A copy in the form of `cuMemcpy2D`, with addresses that any kind of memory has.
fn rectangle(act: &Act, buffers: &Buffers) -> CUDA_MEMCPY2D {
    let Act::Copy {
        to,
        to_pitch,
        from,
        from_pitch,
        size,
        ..
    } = act
    else {
        unreachable!("a copy");
    };
    let kind = |place: &Place| match buffers[&place.buffer].host {
        Some(_) => CU_MEMORYTYPE_UNIFIED,
        None => CU_MEMORYTYPE_DEVICE,
    };
    CUDA_MEMCPY2D {
        src_type: kind(from),
        src_device: from.address(buffers),
        src_pitch: *from_pitch as u64,
        dst_type: kind(to),
        dst_device: to.address(buffers),
        dst_pitch: *to_pitch as u64,
        width: size.width as u64,
        height: size.rows as u64,
        ..CUDA_MEMCPY2D::default()
    }
}

impl Act {
    /// The buffers that it reads or writes, with those of variables.
    pub fn buffers(&self, images: &Images) -> Vec<u32> {
        match self {
            Act::Set { to, .. } | Act::Host { to, .. } => vec![to.buffer],
            Act::Copy { to, from, .. } => vec![to.buffer, from.buffer],
            Act::Launch(launch) => {
                let mut found: Vec<u32> = launch.places.iter().map(|place| place.buffer).collect();
                if launch.kernel.has_variables() {
                    found.extend(&images[&launch.image].variables);
                }
                found
            }
            Act::Empty => Vec::new(),
            Act::Child(acts) => acts.iter().flat_map(|act| act.buffers(images)).collect(),
        }
    }

    /// The images whose kernels it launches.
    pub fn images(&self) -> Vec<u32> {
        match self {
            Act::Launch(launch) => vec![launch.image],
            Act::Child(acts) => acts.iter().flat_map(Act::images).collect(),
            _ => Vec::new(),
        }
    }

    /// What it does to the model.
    pub fn apply(&self, buffers: &mut Buffers, images: &Images) {
        match self {
            Act::Set {
                to,
                pitch,
                element,
                value,
                size,
            } => {
                let content = &mut buffers.get_mut(&to.buffer).expect("a buffer").content;
                for row in 0..size.rows {
                    let start = to.at + row * pitch;
                    let row = &mut content[start..start + size.width * element];
                    let value = &value.to_le_bytes()[..*element];
                    match value.iter().all(|byte| *byte == value[0]) {
                        true => row.fill(value[0]),
                        false => row
                            .chunks_exact_mut(*element)
                            .for_each(|to| to.copy_from_slice(value)),
                    }
                }
            }
            Act::Copy {
                to,
                to_pitch,
                from,
                from_pitch,
                size,
                ..
            } => {
                for row in 0..size.rows {
                    let start = from.at + row * from_pitch;
                    let bytes = buffers[&from.buffer].content[start..start + size.width].to_vec();
                    let start = to.at + row * to_pitch;
                    let content = &mut buffers.get_mut(&to.buffer).expect("a buffer").content;
                    content[start..start + size.width].copy_from_slice(&bytes);
                }
            }
            Act::Launch(launch) => launch.apply(buffers, images),
            Act::Host { to, len, seed } => {
                let content = &mut buffers.get_mut(&to.buffer).expect("a buffer").content;
                content[to.at..to.at + len].copy_from_slice(&Random::new(*seed).bytes(*len));
            }
            Act::Empty => {}
            Act::Child(acts) => acts.iter().for_each(|act| act.apply(buffers, images)),
        }
    }

    /// # Errors
    /// A call's status.
    pub fn submit(
        &self,
        stream: CUstream,
        form: Form,
        buffers: &Buffers,
        images: &Images,
    ) -> Status {
        let is_plain = form == Form::Plain;
        match self {
            Act::Set {
                to,
                pitch,
                element,
                value,
                size,
            } => {
                let (to, value) = (to.address(buffers), *value);
                let (width, rows) = (size.width, size.rows);
                let (small, medium) = (value as u8, value as u16);
                match (rows > 1, element, is_plain) {
                    (false, 1, true) => call!(cuMemsetD8_v2, to, small, width),
                    (false, 2, true) => call!(cuMemsetD16_v2, to, medium, width),
                    (false, _, true) => call!(cuMemsetD32_v2, to, value, width),
                    (false, 1, false) => call!(cuMemsetD8Async, to, small, width, stream),
                    (false, 2, false) => call!(cuMemsetD16Async, to, medium, width, stream),
                    (false, _, false) => call!(cuMemsetD32Async, to, value, width, stream),
                    (true, 1, true) => call!(cuMemsetD2D8_v2, to, *pitch, small, width, rows),
                    (true, 2, true) => call!(cuMemsetD2D16_v2, to, *pitch, medium, width, rows),
                    (true, _, true) => call!(cuMemsetD2D32_v2, to, *pitch, value, width, rows),
                    (true, 1, false) => {
                        call!(cuMemsetD2D8Async, to, *pitch, small, width, rows, stream)
                    }
                    (true, 2, false) => {
                        call!(cuMemsetD2D16Async, to, *pitch, medium, width, rows, stream)
                    }
                    (true, _, false) => {
                        call!(cuMemsetD2D32Async, to, *pitch, value, width, rows, stream)
                    }
                }
            }
            Act::Copy { size, .. } if size.rows > 1 => {
                let copy = rectangle(self, buffers);
                match is_plain {
                    true => call!(cuMemcpy2D_v2, &raw const copy),
                    false => call!(cuMemcpy2DAsync_v2, &raw const copy, stream),
                }
            }
            Act::Copy { .. } => self.submit_copy(stream, is_plain, buffers),
            Act::Launch(launch) => launch.submit(stream, buffers, images),
            Act::Host { .. } => {
                let data = self.writing(buffers, form == Form::Capture);
                let write: extern "C" fn(*mut c_void) = write;
                call!(cuLaunchHostFunc, stream, write, data)
            }
            Act::Empty => Ok(()),
            Act::Child(acts) => acts
                .iter()
                .try_for_each(|act| act.submit(stream, form, buffers, images)),
        }
    }

    fn submit_copy(&self, stream: CUstream, is_plain: bool, buffers: &Buffers) -> Status {
        let Act::Copy {
            to,
            from,
            size,
            way,
            ..
        } = self
        else {
            unreachable!("a copy");
        };
        let (to_at, from_at, len) = (to.address(buffers), from.address(buffers), size.width);
        let host = |place: &Place| {
            let host = buffers[&place.buffer].host?;
            // SAFETY: the place is in the buffer.
            Some(unsafe { host.add(place.at) })
        };
        if *way == Way::Peer {
            let mut context = CUcontext::NULL;
            call!(cuCtxGetCurrent, &mut context)?;
            return match is_plain {
                true => call!(cuMemcpyPeer, to_at, context, from_at, context, len),
                false => call!(
                    cuMemcpyPeerAsync,
                    to_at,
                    context,
                    from_at,
                    context,
                    len,
                    stream
                ),
            };
        }
        let unified = *way == Way::Unified;
        match (host(to), host(from), is_plain) {
            (None, Some(from), true) if !unified => {
                call!(cuMemcpyHtoD_v2, to_at, from.cast_const(), len)
            }
            (None, Some(from), false) if !unified => {
                call!(cuMemcpyHtoDAsync_v2, to_at, from.cast_const(), len, stream)
            }
            (Some(to), None, true) if !unified => call!(cuMemcpyDtoH_v2, to, from_at, len),
            (Some(to), None, false) if !unified => {
                call!(cuMemcpyDtoHAsync_v2, to, from_at, len, stream)
            }
            (None, None, true) if !unified => call!(cuMemcpyDtoD_v2, to_at, from_at, len),
            (None, None, false) if !unified => {
                call!(cuMemcpyDtoDAsync_v2, to_at, from_at, len, stream)
            }
            (_, _, true) => call!(cuMemcpy, to_at, from_at, len),
            (_, _, false) => call!(cuMemcpyAsync, to_at, from_at, len, stream),
        }
    }

    /// Whether it is a host function.
    pub fn is_host(&self) -> bool {
        matches!(self, Act::Host { .. })
    }

    /// A host function of a graph.
    fn host_params(&self, buffers: &Buffers) -> CUDA_HOST_NODE_PARAMS {
        let write: extern "C" fn(*mut c_void) = write;
        CUDA_HOST_NODE_PARAMS {
            function: write as usize as u64,
            data: self.writing(buffers, true) as u64,
        }
    }

    /// The data of a host function.
    fn writing(&self, buffers: &Buffers, stays: bool) -> *mut c_void {
        let Act::Host { to, len, seed } = self else {
            unreachable!("a host function");
        };
        let host = buffers[&to.buffer].host.expect("host memory");
        // SAFETY: the place is in the buffer.
        let to = unsafe { host.add(to.at) };
        let (len, seed) = (*len, *seed);
        Box::into_raw(Box::new(Writing {
            to,
            len,
            seed,
            stays,
        }))
        .cast()
    }

    /// A node of a graph, behind others.
    ///
    /// # Errors
    /// A call's status.
    pub fn add(
        &self,
        graph: CUgraph,
        behind: &[CUgraphNode],
        context: CUcontext,
        buffers: &Buffers,
        images: &Images,
    ) -> Status<CUgraphNode> {
        let mut node = CUgraphNode::NULL;
        let (before, count) = (behind.as_ptr(), behind.len());
        match self {
            Act::Set { .. } => {
                let params = self.set_params(buffers);
                let params = &raw const params;
                call!(
                    cuGraphAddMemsetNode,
                    &mut node,
                    graph,
                    before,
                    count,
                    params,
                    context
                )?;
            }
            Act::Copy { .. } => {
                let params = CUDA_MEMCPY3D::from(rectangle(self, buffers));
                let params = &raw const params;
                call!(
                    cuGraphAddMemcpyNode,
                    &mut node,
                    graph,
                    before,
                    count,
                    params,
                    context
                )?;
            }
            Act::Launch(launch) => launch.with_node(buffers, images, |params| {
                call!(
                    cuGraphAddKernelNode_v2,
                    &mut node,
                    graph,
                    before,
                    count,
                    params
                )
            })?,
            Act::Host { .. } => {
                let params = self.host_params(buffers);
                let params = &raw const params;
                call!(cuGraphAddHostNode, &mut node, graph, before, count, params)?;
            }
            Act::Empty => call!(cuGraphAddEmptyNode, &mut node, graph, before, count)?,
            Act::Child(acts) => {
                let mut child = CUgraph::NULL;
                call!(cuGraphCreate, &mut child, 0u32)?;
                add_all(acts, child, context, buffers, images)?;
                call!(
                    cuGraphAddChildGraphNode,
                    &mut node,
                    graph,
                    before,
                    count,
                    child
                )?;
                call!(cuGraphDestroy, child)?;
            }
        }
        Ok(node)
    }

    fn set_params(&self, buffers: &Buffers) -> CUDA_MEMSET_NODE_PARAMS {
        let Act::Set {
            to,
            pitch,
            element,
            value,
            size,
        } = self
        else {
            unreachable!("a memset");
        };
        let bits = 8 * *element as u32;
        CUDA_MEMSET_NODE_PARAMS {
            to: to.address(buffers),
            pitch: *pitch as u64,
            value: value & (u32::MAX >> (32 - bits)),
            element: *element as u32,
            width: size.width as u64,
            height: size.rows as u64,
        }
    }

    /// Changes an instance's node to this.
    ///
    /// # Errors
    /// A call's status.
    pub fn set_in(
        &self,
        exec: CUgraphExec,
        node: CUgraphNode,
        context: CUcontext,
        buffers: &Buffers,
        images: &Images,
    ) -> Status {
        match self {
            Act::Set { .. } => {
                let params = self.set_params(buffers);
                let params = &raw const params;
                call!(cuGraphExecMemsetNodeSetParams, exec, node, params, context)
            }
            Act::Copy { .. } => {
                let params = CUDA_MEMCPY3D::from(rectangle(self, buffers));
                let params = &raw const params;
                call!(cuGraphExecMemcpyNodeSetParams, exec, node, params, context)
            }
            Act::Launch(launch) => launch.with_node(buffers, images, |params| {
                call!(cuGraphExecKernelNodeSetParams_v2, exec, node, params)
            }),
            Act::Host { .. } => {
                let params = self.host_params(buffers);
                let params = &raw const params;
                call!(cuGraphExecHostNodeSetParams, exec, node, params)
            }
            _ => Ok(()),
        }
    }

    /// The same with other values, as an instance's node may be changed.
    pub fn vary(&mut self, random: &mut Random) {
        match self {
            Act::Set { value, .. } => *value = random.word(),
            Act::Host { seed, .. } => *seed = random.next(),
            Act::Launch(launch) => (launch.a, launch.b) = (random.word(), random.word()),
            Act::Child(acts) => acts.iter_mut().for_each(|act| act.vary(random)),
            _ => {}
        }
    }
}

/// Nodes for all, each behind those before it that use the same buffers.
///
/// # Errors
/// A call's status.
pub fn add_all(
    acts: &[Act],
    graph: CUgraph,
    context: CUcontext,
    buffers: &Buffers,
    images: &Images,
) -> Status<Vec<CUgraphNode>> {
    let uses: Vec<Vec<u32>> = acts.iter().map(|act| act.buffers(images)).collect();
    let mut nodes: Vec<CUgraphNode> = Vec::new();
    for (at, act) in acts.iter().enumerate() {
        let shares = |other: &usize| uses[at].iter().any(|buffer| uses[*other].contains(buffer));
        let behind: Vec<CUgraphNode> = (0..at).filter(shares).map(|other| nodes[other]).collect();
        nodes.push(act.add(graph, &behind, context, buffers, images)?);
    }
    Ok(nodes)
}

/// Words that a kernel accesses in its target.
pub fn reach(kernel: Kernel, count: u32) -> usize {
    match kernel {
        Kernel::Show => SHOWN,
        _ => count as usize,
    }
}
