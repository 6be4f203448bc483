//! Copies and memsets between managed and other memory, graphs of them, prefetches, advice and attachments.

use super::*;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Managed,
    Device,
    Pinned,
    Pageable,
}

impl Kind {
    fn is_on_the_host(self) -> bool {
        self != Kind::Device
    }

    /// Whether kernels and calls that want a device address may use it.
    fn is_for_the_device(self) -> bool {
        self != Kind::Pageable
    }
}

/// A buffer of some kind and what must be in it.
struct Buffer {
    kind: Kind,
    at: u64,
    model: Vec<u8>,
}

impl Buffer {
    fn new(random: &mut Random, kind: Kind, len: usize) -> Outcome<Buffer> {
        let model = random.bytes(len);
        let at = match kind {
            Kind::Managed => allocate(len)?,
            Kind::Device => {
                let mut at = 0u64;
                must!(cuMemAlloc_v2, &mut at, len);
                at
            }
            Kind::Pinned => {
                let mut at = null_mut::<c_void>();
                must!(cuMemHostAlloc, &mut at, len, 0 as c_uint);
                at as u64
            }
            Kind::Pageable => Box::leak(vec![0u8; len].into_boxed_slice()).as_mut_ptr() as u64,
        };
        match kind {
            Kind::Device => {
                must!(cuMemcpyHtoD_v2, at, model.as_ptr(), len);
                // A copy of pageable memory may return before its end, and other streams do not wait for it.
                must!(cuCtxSynchronize);
            }
            _ => host(at, len).copy_from_slice(&model),
        }
        Ok(Buffer { kind, at, model })
    }

    fn check(&self, what: &str) -> Outcome {
        let what = format!("{what}, {:?} memory", self.kind);
        if self.kind != Kind::Device {
            return compare(&what, self.at, &self.model);
        }
        let mut got = vec![0u8; self.model.len()];
        must!(cuMemcpyDtoH_v2, got.as_mut_ptr(), self.at, got.len());
        same(&what, self.at, &self.model, &got)
    }

    fn free(self) -> Outcome {
        match self.kind {
            Kind::Managed | Kind::Device => must!(cuMemFree_v2, self.at),
            Kind::Pinned => must!(cuMemFreeHost, self.at),
            Kind::Pageable => {
                let all = std::ptr::slice_from_raw_parts_mut(self.at as *mut u8, self.model.len());
                // SAFETY: leaked by `new`, and nobody uses it any more.
                drop(unsafe { Box::from_raw(all) });
            }
        }
        Ok(())
    }
}

/// Buffers of one length.
struct Buffers<'a> {
    setup: &'a Setup,
    stream: CUstream,
    len: usize,
    all: Vec<Buffer>,
}

impl Buffers<'_> {
    /// Two different buffers.
    fn two(&self, random: &mut Random) -> (usize, usize) {
        let from = random.below(self.all.len());
        let to = (from + 1 + random.below(self.all.len() - 1)) % self.all.len();
        (from, to)
    }

    fn settle(&self, random: &mut Random) -> Outcome {
        wait(random, self.stream)
    }

    /// One copy of a range, by one of the calls that take such memory; gives the call's name.
    fn copy(&mut self, random: &mut Random) -> Outcome<&'static str> {
        let (from, to) = self.two(random);
        let len = random.range(self.len).len();
        let [source, target] = [0, 1].map(|_| random.below(self.len - len + 1));
        let a = self.all[from].at + source as u64;
        let b = self.all[to].at + target as u64;
        let (x, y) = (self.all[from].kind, self.all[to].kind);
        let stream = self.stream;
        let calls = [
            (true, "cuMemcpy"),
            (true, "cuMemcpyAsync"),
            (x.is_on_the_host() && y.is_for_the_device(), "cuMemcpyHtoD"),
            (
                x.is_on_the_host() && y.is_for_the_device(),
                "cuMemcpyHtoDAsync",
            ),
            (x.is_for_the_device() && y.is_on_the_host(), "cuMemcpyDtoH"),
            (
                x.is_for_the_device() && y.is_on_the_host(),
                "cuMemcpyDtoHAsync",
            ),
            (
                x.is_for_the_device() && y.is_for_the_device(),
                "cuMemcpyDtoD",
            ),
            (
                x.is_for_the_device() && y.is_for_the_device(),
                "cuMemcpyDtoDAsync",
            ),
        ];
        let possible: Vec<&str> = calls
            .into_iter()
            .filter(|(is, _)| *is)
            .map(|(_, name)| name)
            .collect();
        let name = possible[random.below(possible.len())];
        let both_of_the_host = [x, y]
            .iter()
            .all(|kind| matches!(kind, Kind::Pinned | Kind::Pageable));
        if both_of_the_host || !name.ends_with("Async") {
            // It need not wait for this stream.
            self.settle(random)?;
        }
        match name {
            "cuMemcpy" => must!(cuMemcpy, b, a, len),
            "cuMemcpyAsync" => must!(cuMemcpyAsync, b, a, len, stream),
            "cuMemcpyHtoD" => must!(cuMemcpyHtoD_v2, b, a, len),
            "cuMemcpyHtoDAsync" => must!(cuMemcpyHtoDAsync_v2, b, a, len, stream),
            "cuMemcpyDtoH" => must!(cuMemcpyDtoH_v2, b, a, len),
            "cuMemcpyDtoHAsync" => must!(cuMemcpyDtoHAsync_v2, b, a, len, stream),
            "cuMemcpyDtoD" => must!(cuMemcpyDtoD_v2, b, a, len),
            _ => must!(cuMemcpyDtoDAsync_v2, b, a, len, stream),
        }
        let bytes = self.all[from].model[source..source + len].to_vec();
        self.all[to].model[target..target + len].copy_from_slice(&bytes);
        if !name.ends_with("Async") {
            // A copy between device addresses may return before its end.
            must!(cuCtxSynchronize);
        }
        Ok(name)
    }

    /// Rows of two buffers with pitches of their own.
    fn copy_2d(&mut self, random: &mut Random) -> Outcome<&'static str> {
        let (from, to) = self.two(random);
        let width = random.size((self.len / 4).clamp(1, 5000));
        let most = (self.len - width) / 2 + 1;
        let [source_pitch, target_pitch] =
            [0, 1].map(|_| (width + random.below(50)).min(most.max(width)));
        let rows = (self.len / source_pitch.max(target_pitch)).min(random.below(40) + 1);
        if rows == 0 {
            return Ok("no rows");
        }
        let memory = |random: &mut Random, buffer: &Buffer| {
            // Kind of memory, host address, device address.
            let unified = (CU_MEMORYTYPE_UNIFIED, 0, buffer.at);
            let on_host = (CU_MEMORYTYPE_HOST, buffer.at, 0);
            let on_device = (CU_MEMORYTYPE_DEVICE, 0, buffer.at);
            match (buffer.kind, random.below(3)) {
                (Kind::Pageable, 0) | (_, 0) => unified,
                (Kind::Pageable | Kind::Pinned, _) => on_host,
                (Kind::Managed, 1) => on_host,
                _ => on_device,
            }
        };
        let (src_type, src_host, src_device) = memory(random, &self.all[from]);
        let (dst_type, dst_host, dst_device) = memory(random, &self.all[to]);
        let copy = CUDA_MEMCPY2D {
            src_type,
            src_host,
            src_device,
            src_pitch: source_pitch as u64,
            dst_type,
            dst_host,
            dst_device,
            dst_pitch: target_pitch as u64,
            width: width as u64,
            height: rows as u64,
            ..CUDA_MEMCPY2D::default()
        };
        let name = match random.below(3) {
            0 => {
                must!(cuMemcpy2DAsync_v2, &raw const copy, self.stream);
                "cuMemcpy2DAsync"
            }
            which => {
                self.settle(random)?;
                match which {
                    1 => must!(cuMemcpy2D_v2, &raw const copy),
                    _ => must!(cuMemcpy2DUnaligned_v2, &raw const copy),
                }
                must!(cuCtxSynchronize);
                "cuMemcpy2D"
            }
        };
        for row in 0..rows {
            let (source, target) = (row * source_pitch, row * target_pitch);
            let bytes = self.all[from].model[source..source + width].to_vec();
            self.all[to].model[target..target + width].copy_from_slice(&bytes);
        }
        Ok(name)
    }

    fn memset(&mut self, random: &mut Random) -> Outcome<&'static str> {
        let chosen = self.for_the_device(random);
        let size = [1, 2, 4][random.below(3)];
        let range = random.range(self.len);
        let end = range.end / size * size;
        let range = range.start.next_multiple_of(size).min(end)..end;
        if range.is_empty() {
            return Ok("an empty memset");
        }
        let value = random.number() as u32;
        let count = range.len() / size;
        let buffer = &mut self.all[chosen];
        let at = buffer.at + range.start as u64;
        let stream = self.stream;
        match size {
            1 => must!(cuMemsetD8Async, at, value as u8, count, stream),
            2 => must!(cuMemsetD16Async, at, value as u16, count, stream),
            _ => must!(cuMemsetD32Async, at, value, count, stream),
        }
        for element in buffer.model[range].chunks_exact_mut(size) {
            element.copy_from_slice(&value.to_le_bytes()[..size]);
        }
        Ok("cuMemsetAsync")
    }

    /// The calls that wait, and rows.
    fn memset_now(&mut self, random: &mut Random) -> Outcome<&'static str> {
        let chosen = self.for_the_device(random);
        let range = random.range(self.len);
        let value = random.number() as u32;
        self.settle(random)?;
        let buffer = &mut self.all[chosen];
        let at = buffer.at + range.start as u64;
        if random.one_of(2) {
            must!(cuMemsetD8_v2, at, value as u8, range.len());
            must!(cuCtxSynchronize);
            buffer.model[range].fill(value as u8);
            return Ok("cuMemsetD8");
        }
        let (width, rows) = (range.len() / 4, 3);
        if width == 0 {
            return Ok("no rows");
        }
        let pitch = range.len() / 3;
        must!(cuMemsetD2D8_v2, at, pitch, value as u8, width, rows);
        must!(cuCtxSynchronize);
        for row in buffer.model[range].chunks_exact_mut(pitch).take(rows) {
            row[..width].fill(value as u8);
        }
        Ok("cuMemsetD2D8")
    }

    fn for_the_device(&self, random: &mut Random) -> usize {
        loop {
            let chosen = random.below(self.all.len());
            if self.all[chosen].kind.is_for_the_device() {
                return chosen;
            }
        }
    }

    fn kernel(&mut self, random: &mut Random) -> Outcome<&'static str> {
        let chosen = self.for_the_device(random);
        let range = random.range(self.len);
        let value = random.number() as u32;
        let buffer = &mut self.all[chosen];
        let work = Work {
            to: buffer.at + range.start as u64,
            count: range.len(),
            value,
            ..Work::default()
        };
        let kernels = &self.setup.kernels;
        kernels.launch(kernels.add_bytes, self.stream, &work)?;
        add_bytes(&mut buffer.model[range], value);
        Ok("a kernel")
    }

    /// The host changes managed and other memory when no work is in flight.
    fn host_changes(&mut self, random: &mut Random) -> Outcome<&'static str> {
        self.settle(random)?;
        for _ in 0..3 {
            let chosen = random.below(self.all.len());
            let range = random.range(self.len);
            let buffer = &mut self.all[chosen];
            if buffer.kind != Kind::Device {
                let bytes = random.bytes(range.len());
                let at = buffer.at + range.start as u64;
                host(at, range.len()).copy_from_slice(&bytes);
                buffer.model[range].copy_from_slice(&bytes);
            }
        }
        Ok("the host")
    }

    /// A hint for a managed buffer, which changes no byte.
    fn hint(&mut self, random: &mut Random) -> Outcome<&'static str> {
        const ADVICE: [u32; 6] = [
            CU_MEM_ADVISE_SET_READ_MOSTLY,
            CU_MEM_ADVISE_UNSET_READ_MOSTLY,
            CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
            CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION,
            CU_MEM_ADVISE_SET_ACCESSED_BY,
            CU_MEM_ADVISE_UNSET_ACCESSED_BY,
        ];
        let chosen = random.below(2);
        let (at, range) = (self.all[chosen].at, random.range(self.len));
        let begin = at + range.start as u64;
        let place = [CU_DEVICE_CPU, self.setup.device][random.below(2)];
        if random.one_of(2) {
            let advice = ADVICE[random.below(ADVICE.len())];
            must!(cuMemAdvise, begin, range.len(), advice, place);
            return Ok("cuMemAdvise");
        }
        let stream = self.stream;
        must!(cuMemPrefetchAsync, begin, range.len(), place, stream);
        Ok("cuMemPrefetchAsync")
    }

    /// A managed buffer is for the host, for one stream, and then for all again.
    fn attach(&mut self, random: &mut Random) -> Outcome<&'static str> {
        let chosen = random.below(2);
        let at = self.all[chosen].at;
        let stream = self.stream;
        self.settle(random)?;
        must!(
            cuStreamAttachMemAsync,
            stream,
            at,
            0usize,
            CU_MEM_ATTACH_HOST
        );
        self.settle(random)?;
        self.all[chosen].check("attached to the host")?;
        let byte = random.number() as u8;
        host(at, self.len).fill(byte);
        self.all[chosen].model.fill(byte);
        must!(
            cuStreamAttachMemAsync,
            stream,
            at,
            0usize,
            CU_MEM_ATTACH_SINGLE
        );
        self.settle(random)?;
        let kernels = &self.setup.kernels;
        let work = Work {
            to: at,
            count: self.len,
            value: 5,
            ..Work::default()
        };
        kernels.launch(kernels.add_bytes, stream, &work)?;
        add_bytes(&mut self.all[chosen].model, 5);
        must!(
            cuStreamAttachMemAsync,
            stream,
            at,
            0usize,
            CU_MEM_ATTACH_GLOBAL
        );
        self.settle(random)?;
        Ok("cuStreamAttachMemAsync")
    }

    fn check(&self, what: &str) -> Outcome {
        self.all.iter().try_for_each(|buffer| buffer.check(what))
    }

    /// A graph of kernels, copies and memsets of all but pageable memory, launched again and again.
    fn graph(&mut self, random: &mut Random) -> Outcome {
        self.settle(random)?;
        let stream = self.stream;
        let before: Vec<Vec<u8>> = self.all.iter().map(|b| b.model.clone()).collect();
        let steps: Vec<Step> = (0..random.below(8) + 2)
            .map(|_| Step::new(random, self))
            .collect();
        must!(
            cuStreamBeginCapture_v2,
            stream,
            CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        );
        for step in &steps {
            step.enqueue(self)?;
        }
        let mut graph = CUgraph::NULL;
        must!(cuStreamEndCapture, stream, &mut graph);
        for (buffer, model) in self.all.iter().zip(before) {
            same(
                "a capture changes nothing",
                buffer.at,
                &model,
                &buffer.model,
            )?;
        }
        let mut exec = CUgraphExec::NULL;
        must!(cuGraphInstantiateWithFlags, &mut exec, graph, 0u64);
        for _ in 0..random.below(5) + 1 {
            for _ in 0..random.below(3) + 1 {
                must!(cuGraphLaunch, exec, stream);
                steps.iter().for_each(|step| step.model(self));
            }
            self.settle(random)?;
            if random.one_of(2) {
                self.check("after a graph")?;
            }
            if random.one_of(2) {
                self.host_changes(random)?;
            }
            if random.one_of(4) {
                self.hint(random)?;
            }
        }
        self.settle(random)?;
        self.check("after the graphs")?;
        must!(cuGraphExecDestroy, exec);
        must!(cuGraphDestroy, graph);
        Ok(())
    }
}

/// A step of a graph: indices of buffers, and ranges.
enum Step {
    Add(usize, std::ops::Range<usize>, u32),
    Set(usize, std::ops::Range<usize>, u8),
    /// From, to, first bytes, number of bytes.
    Copy([usize; 2], [usize; 2], usize),
}

impl Step {
    fn new(random: &mut Random, buffers: &Buffers<'_>) -> Step {
        let chosen = buffers.for_the_device(random);
        let range = random.range(buffers.len);
        match random.below(4) {
            0 => Step::Set(chosen, range, random.number() as u8),
            1 | 2 => {
                let from = buffers.for_the_device(random);
                if from == chosen {
                    return Step::new(random, buffers);
                }
                let len = range.len();
                let starts = [0, 1].map(|_| random.below(buffers.len - len + 1));
                Step::Copy([from, chosen], starts, len)
            }
            _ => Step::Add(chosen, range, random.number() as u32),
        }
    }

    fn enqueue(&self, buffers: &Buffers<'_>) -> Outcome {
        let stream = buffers.stream;
        match self {
            Step::Add(chosen, range, value) => {
                let work = Work {
                    to: buffers.all[*chosen].at + range.start as u64,
                    count: range.len(),
                    value: *value,
                    ..Work::default()
                };
                let kernels = &buffers.setup.kernels;
                kernels.launch(kernels.add_bytes, stream, &work)
            }
            Step::Set(chosen, range, byte) => {
                let at = buffers.all[*chosen].at + range.start as u64;
                must!(cuMemsetD8Async, at, *byte, range.len(), stream);
                Ok(())
            }
            Step::Copy(which, starts, len) => {
                let [from, to] =
                    [0, 1].map(|side| buffers.all[which[side]].at + starts[side] as u64);
                let kinds = which.map(|which| buffers.all[which].kind);
                match kinds {
                    [Kind::Device, Kind::Pinned] => {
                        must!(cuMemcpyDtoHAsync_v2, to, from, *len, stream);
                    }
                    [Kind::Pinned, Kind::Device] => {
                        must!(cuMemcpyHtoDAsync_v2, to, from, *len, stream);
                    }
                    _ => must!(cuMemcpyAsync, to, from, *len, stream),
                }
                Ok(())
            }
        }
    }

    fn model(&self, buffers: &mut Buffers<'_>) {
        match self {
            Step::Add(chosen, range, value) => {
                add_bytes(&mut buffers.all[*chosen].model[range.clone()], *value);
            }
            Step::Set(chosen, range, byte) => {
                buffers.all[*chosen].model[range.clone()].fill(*byte);
            }
            Step::Copy([from, to], [source, target], len) => {
                let bytes = buffers.all[*from].model[*source..*source + *len].to_vec();
                buffers.all[*to].model[*target..*target + *len].copy_from_slice(&bytes);
            }
        }
    }
}

pub fn copies(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    loop {
        let len = random.size((setup.most / 4).max(64)).max(16);
        let kinds = [
            Kind::Managed,
            Kind::Managed,
            Kind::Device,
            Kind::Pinned,
            Kind::Pageable,
        ];
        let mut buffers = Buffers {
            setup,
            stream: stream()?,
            len,
            all: Vec::new(),
        };
        for kind in kinds {
            buffers.all.push(Buffer::new(random, kind, len)?);
        }
        for _ in 0..20 {
            // What was done since the last comparison.
            let mut done = Vec::new();
            for _ in 0..random.below(8) + 1 {
                done.push(match random.below(12) {
                    0..=3 => buffers.copy(random)?,
                    4 => buffers.copy_2d(random)?,
                    5 => buffers.memset(random)?,
                    6 => buffers.memset_now(random)?,
                    7 => buffers.kernel(random)?,
                    8 => buffers.host_changes(random)?,
                    9 => buffers.attach(random)?,
                    _ => buffers.hint(random)?,
                });
            }
            buffers.settle(random)?;
            buffers.check(&format!("after {}", done.join(", ")))?;
            buffers.graph(random)?;
            if Instant::now() > until {
                break;
            }
        }
        must!(cuStreamDestroy_v2, buffers.stream);
        buffers.all.drain(..).try_for_each(Buffer::free)?;
        if Instant::now() > until {
            return Ok(());
        }
    }
}
