//! The walk: one random operation after the other, each on the driver and on the model.

use crate::acts::{Act, By, Form, Images, Launch, Place, Rows, Way, reach};
use crate::arrays::Array;
use crate::call;
use crate::calls::{Status, context, same, same_bytes};
use crate::graphs::{Exec, Graph, Made, Recipe};
use crate::images::{Image, Kernel};
use crate::memory::{Ask, Buffer, Buffers, Origin, Pool, is_gone};
use crate::random::Random;
use crate::streams::{Hands, LEGACY, Span, Streams};
use mpsshim_api::cuda::*;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes that a program has at most.
const MOST: usize = 64 << 20;
/// Words that a kernel writes at most.
const MOST_WORDS: usize = 4096;

/// Kinds of steps, with weights.
#[derive(Clone, Copy, Debug)]
enum Step {
    Work,
    WriteByHost,
    ReadByHost,
    CopyIn,
    CopyOut,
    Allocate,
    Free,
    CreateStream,
    DestroyStream,
    Wait,
    Load,
    Unload,
    MakeGraph,
    Instantiate,
    LaunchGraph,
    ChangeInstance,
    ChangeGraph,
    UpdateInstance,
    DestroyGraph,
    Limit,
    Pool,
    Span,
    Query,
    Array,
}

const STEPS: [(usize, Step); 24] = [
    (40, Step::Work),
    (5, Step::WriteByHost),
    (4, Step::ReadByHost),
    (6, Step::CopyIn),
    (5, Step::CopyOut),
    (10, Step::Allocate),
    (7, Step::Free),
    (2, Step::CreateStream),
    (2, Step::DestroyStream),
    (4, Step::Wait),
    (2, Step::Load),
    (2, Step::Unload),
    (4, Step::MakeGraph),
    (3, Step::Instantiate),
    (8, Step::LaunchGraph),
    (4, Step::ChangeInstance),
    (1, Step::ChangeGraph),
    (2, Step::UpdateInstance),
    (2, Step::DestroyGraph),
    (1, Step::Limit),
    (2, Step::Pool),
    (3, Step::Span),
    (3, Step::Query),
    (2, Step::Array),
];

/// A copy to pageable memory that has not been waited for.
struct Pending {
    found: Vec<u8>,
    expected: Vec<u8>,
}

pub struct Walk {
    random: Random,
    context: CUcontext,
    /// Whether it makes what binds a session to its server: managed memory, graphs that name variables.
    binds: bool,
    /// Whether it allocates managed memory.
    has_managed: bool,
    traces: bool,
    pub steps: u64,
    /// Of the next object of any kind.
    number: u32,
    streams: Streams,
    hands: Hands,
    /// In captures.
    capture_hands: Hands,
    buffers: Buffers,
    images: Images,
    graphs: BTreeMap<u32, Graph>,
    execs: BTreeMap<u32, Exec>,
    pools: Vec<Pool>,
    spans: Vec<Span>,
    arrays: Vec<Array>,
    pending: Vec<Pending>,
    stack: Option<usize>,
}

impl Walk {
    /// # Errors
    /// A call's status.
    pub fn new(seed: u64, binds: bool, traces: bool) -> Status<Walk> {
        let context = context()?;
        let mut walk = Walk {
            random: Random::new(seed),
            context,
            binds,
            has_managed: binds && has_managed()?,
            traces,
            steps: 0,
            number: 0,
            streams: Streams::new(),
            hands: Hands::new()?,
            capture_hands: Hands::new()?,
            buffers: Buffers::new(),
            images: Images::new(),
            graphs: BTreeMap::new(),
            execs: BTreeMap::new(),
            pools: Vec::new(),
            spans: Vec::new(),
            arrays: Vec::new(),
            pending: Vec::new(),
            stack: None,
        };
        walk.load(true)?;
        for _ in 0..4 {
            walk.allocate()?;
        }
        Ok(walk)
    }

    fn note(&self, text: impl FnOnce() -> String) {
        if self.traces {
            eprintln!("{}: {}", self.steps, text());
        }
    }

    fn new_number(&mut self) -> u32 {
        self.number += 1;
        self.number
    }

    pub fn objects(&self) -> usize {
        self.buffers.len()
            + self.streams.own().len()
            + self.images.len()
            + self.graphs.len()
            + self.execs.len()
            + self.pools.len()
            + self.spans.len()
            + self.arrays.len()
    }

    /// Makes so many steps.
    ///
    /// # Errors
    /// A call's status, or a difference from the model.
    pub fn walk(&mut self, steps: u64) -> Status {
        for _ in 0..steps {
            self.steps += 1;
            self.step()?;
        }
        Ok(())
    }

    fn step(&mut self) -> Status {
        let all: usize = STEPS.iter().map(|(weight, _)| weight).sum();
        let mut left = self.random.below(all);
        let chosen = STEPS
            .iter()
            .find(|(weight, _)| match left.checked_sub(*weight) {
                Some(rest) => {
                    left = rest;
                    false
                }
                None => true,
            });
        let (_, step) = chosen.expect("less than the sum");
        match step {
            Step::Work => self.work(),
            Step::WriteByHost => self.write_by_host(),
            Step::ReadByHost => self.read_by_host(),
            Step::CopyIn => self.copy_in(),
            Step::CopyOut => self.copy_out(),
            Step::Allocate => self.allocate(),
            Step::Free => self.free(),
            Step::CreateStream => self.create_stream(),
            Step::DestroyStream => self.destroy_stream(),
            Step::Wait => self.wait(),
            Step::Load => {
                let has_code = !self.random.once_in(4);
                self.load(has_code)
            }
            Step::Unload => self.unload(),
            Step::MakeGraph => self.make_graph(),
            Step::Instantiate => self.instantiate(),
            Step::LaunchGraph => self.launch_graph(),
            Step::ChangeInstance => self.change_instance(),
            Step::ChangeGraph => self.change_graph(),
            Step::UpdateInstance => self.update_instance(),
            Step::DestroyGraph => self.destroy_graph(),
            Step::Limit => self.limit(),
            Step::Pool => self.pool(),
            Step::Span => self.span(),
            Step::Query => self.query(),
            Step::Array => self.array(),
        }
    }

    /// Waits for everything.
    ///
    /// # Errors
    /// A call's status, or a difference in what was copied to the program's memory.
    pub fn rest(&mut self) -> Status {
        call!(cuCtxSynchronize)?;
        self.hands.rest();
        for Pending { found, expected } in self.pending.drain(..) {
            same_bytes(|| "a copy to pageable memory".into(), &found, &expected)?;
        }
        Ok(())
    }

    /// Waits for everything and compares everything.
    ///
    /// # Errors
    /// A call's status, or a difference from the model.
    pub fn check(&mut self) -> Status {
        self.rest()?;
        self.streams.check()?;
        self.hands.check()?;
        for (number, buffer) in &mut self.buffers {
            buffer.check(*number)?;
            if let Origin::Variable { image, name } = buffer.origin {
                let found = self.images[&image].address(name, buffer.content.len())?;
                same(|| format!("address of {name:?}"), found, buffer.views[0])?;
            }
        }
        self.graphs.values().try_for_each(Graph::check)?;
        self.pools.iter().try_for_each(Pool::check)?;
        self.spans.iter_mut().try_for_each(Span::check)?;
        self.arrays.iter().try_for_each(Array::check)?;
        self.check_textures()?;
        if let Some(expected) = self.stack {
            let mut found = 0usize;
            call!(cuCtxGetLimit, &mut found, CU_LIMIT_STACK_SIZE)?;
            same(|| "stack size".into(), found, expected)?;
        }
        call!(cuCtxSynchronize)
    }

    fn a_stream(&mut self) -> u32 {
        let numbers = self.streams.numbers();
        self.random.pick(&numbers).expect("the default ones")
    }

    fn a_buffer(&mut self, fits: impl Fn(&Buffer) -> bool) -> Option<u32> {
        let those = self.buffers.iter().filter(|(_, buffer)| fits(buffer));
        let numbers: Vec<u32> = those.map(|(number, _)| *number).collect();
        self.random.pick(&numbers)
    }

    /// Part of a buffer: a place that is aligned, and the bytes of it.
    fn part(&mut self, buffer: u32, align: usize) -> Option<(Place, usize)> {
        let (len, views) = (
            self.buffers[&buffer].content.len(),
            self.buffers[&buffer].views.len(),
        );
        let units = len / align;
        if units == 0 {
            return None;
        }
        let first = if self.random.once_in(3) {
            0
        } else {
            self.random.below(units)
        };
        let most = units - first;
        let few = most.min((64 << 10) / align);
        let count = match self.random.below(8) {
            0 => most,
            1..4 => few,
            _ => self.random.between(1, few),
        };
        let view = self.random.below(views);
        Some((
            Place {
                buffer,
                view,
                at: first * align,
            },
            count * align,
        ))
    }

    /// Submits work to a stream, behind all that uses the same memory, and does the same to the model.
    fn submit(&mut self, act: &Act, stream: u32, form: Form) -> Status {
        self.note(|| format!("stream {stream} {form:?} {act:?}"));
        self.hands
            .claim(&act.buffers(&self.images), stream, &self.streams)?;
        let handle = self.streams.handle(stream);
        act.submit(handle, form, &self.buffers, &self.images)?;
        act.apply(&mut self.buffers, &self.images);
        Ok(())
    }

    fn work(&mut self) -> Status {
        let Some(act) = self.act(false) else {
            return Ok(());
        };
        let stream = self.a_stream();
        let form = match stream == LEGACY && self.random.once_in(2) {
            true => Form::Plain,
            false => Form::Stream,
        };
        self.submit(&act, stream, form)
    }

    /// One operation.
    fn act(&mut self, for_graph: bool) -> Option<Act> {
        match self.random.below(20) {
            0..6 => self.memset(for_graph),
            6..12 => self.copy(for_graph),
            12 if for_graph && self.random.once_in(3) => Some(Act::Empty),
            12 => self.host_function(),
            _ => self.launch(for_graph),
        }
    }

    /// Whether operations of a kind may use a buffer.
    fn may_use(&self, for_graph: bool) -> impl Fn(&Buffer) -> bool + use<> {
        let without_variables = for_graph && !self.binds;
        move |buffer| !(without_variables && buffer.is_variable())
    }

    fn memset(&mut self, for_graph: bool) -> Option<Act> {
        let fits = self.may_use(for_graph);
        let buffer = self.a_buffer(fits)?;
        let element = self.random.pick(&[1, 2, 4])?;
        let (to, len) = self.part(buffer, element)?;
        let value = self.random.word();
        let count = len / element;
        let (pitch, size) = match count > 8 && self.random.once_in(4) {
            true => {
                let (pitch, width, rows) = self.rows(count);
                (pitch * element, Rows { width, rows })
            }
            false => (
                0,
                Rows {
                    width: count,
                    rows: 1,
                },
            ),
        };
        Some(Act::Set {
            to,
            pitch,
            element,
            value,
            size,
        })
    }

    /// Pitch, width and number of rows within so many elements.
    fn rows(&mut self, count: usize) -> (usize, usize, usize) {
        let pitch = self.random.between(2, (count / 2).min(4096));
        let width = self.random.between(1, pitch);
        let rows = self.random.between(1, (count / pitch).min(64));
        (pitch, width, rows)
    }

    fn copy(&mut self, for_graph: bool) -> Option<Act> {
        let fits = self.may_use(for_graph);
        let target = self.a_buffer(&fits)?;
        let source = self.a_buffer(&fits)?;
        if target == source {
            return None;
        }
        let align = self.random.pick(&[1, 4, 16])?;
        let (to, to_len) = self.part(target, align)?;
        let (from, from_len) = self.part(source, align)?;
        let way = self
            .random
            .pick(&[Way::Typed, Way::Typed, Way::Unified, Way::Peer])?;
        let is_host = |buffer: u32| self.buffers[&buffer].host.is_some();
        let is_variable = |buffer: u32| self.buffers[&buffer].is_variable();
        let plain =
            is_host(target) || is_host(source) || is_variable(target) || is_variable(source);
        let way = match way {
            Way::Peer if plain || for_graph => Way::Typed,
            way => way,
        };
        if to_len.min(from_len) > 8 && self.random.once_in(4) {
            let (to_pitch, first, rows) = self.rows(to_len);
            let (from_pitch, second, others) = self.rows(from_len);
            let size = Rows {
                width: first.min(second),
                rows: rows.min(others),
            };
            return Some(Act::Copy {
                to,
                to_pitch,
                from,
                from_pitch,
                size,
                way,
            });
        }
        let size = Rows {
            width: to_len.min(from_len),
            rows: 1,
        };
        Some(Act::Copy {
            to,
            to_pitch: 0,
            from,
            from_pitch: 0,
            size,
            way,
        })
    }

    fn host_function(&mut self) -> Option<Act> {
        let buffer = self.a_buffer(|buffer| buffer.host.is_some())?;
        let (to, len) = self.part(buffer, 1)?;
        let seed = self.random.next();
        Some(Act::Host {
            to,
            len: len.min(64 << 10),
            seed,
        })
    }

    fn launch(&mut self, for_graph: bool) -> Option<Act> {
        let those = self.images.iter().filter(|(_, image)| image.has_code());
        let numbers: Vec<u32> = those.map(|(number, _)| *number).collect();
        let image = self.random.pick(&numbers)?;
        let kernel = self.random.pick(&Kernel::ALL)?;
        let block = self.random.pick(&[32u32, 64, 128, 256])?;
        let (a, b) = (self.random.word(), self.random.word());
        let by = self.random.pick(&[By::Pointers, By::Buffer, By::Ex])?;
        let may_use = self.may_use(for_graph);
        let fits = |buffer: &Buffer| {
            let is_constant =
                matches!(buffer.origin, Origin::Variable { name, .. } if name == c"factors");
            may_use(buffer) && !is_constant
        };
        let (mut places, mut most): (Vec<Place>, usize) = (Vec::new(), MOST_WORDS);
        for _ in 0..usize::from(kernel.has_target()) + kernel.sources() {
            let buffer = self.a_buffer(fits)?;
            if places.first().is_some_and(|target| target.buffer == buffer) {
                return None;
            }
            let (place, len) = self.part(buffer, 4)?;
            places.push(place);
            most = most.min(len / 4);
        }
        let (count, block) = match kernel {
            Kernel::Reverse => (most as u32 / block * block, block),
            Kernel::Count => (self.random.between(1, 4) as u32 * block, block),
            Kernel::Mark | Kernel::Show => (64, 64),
            _ => (most as u32, block),
        };
        let is_enough = !kernel.has_target() || most >= reach(kernel, count);
        let is_own =
            kernel == Kernel::Show && self.images[&image].variables.contains(&places[0].buffer);
        if count == 0 || !is_enough || is_own {
            return None;
        }
        Some(Act::Launch(Launch {
            image,
            kernel,
            places,
            count,
            block,
            a,
            b,
            by,
        }))
    }

    fn size(&mut self) -> usize {
        let len = match self.random.below(200) {
            0..120 => self.random.between(1, 1024),
            120..180 => self.random.between(256, 16 << 10),
            180..199 => self.random.between(4096, 256 << 10),
            _ => 6 << 20,
        };
        match self.random.once_in(10) {
            true => 4 * len - self.random.below(4),
            false => 4 * len,
        }
    }

    fn allocate(&mut self) -> Status {
        let stream = self.a_stream();
        let len = self.size();
        let used: usize = self
            .buffers
            .values()
            .map(|buffer| buffer.content.len())
            .sum();
        let pools: Vec<CUmemoryPool> = self.pools.iter().map(|pool| pool.pool).collect();
        let handle = self.streams.handle(stream);
        let ask = match self.random.below(16) {
            0..5 => Ask::Device { len },
            5 => Ask::Pitched {
                width: self.random.between(4, 1024),
                rows: self.random.between(1, 32),
            },
            6..10 => Ask::Pool {
                len,
                pool: self.random.pick(&pools),
                stream: handle,
            },
            10..12 => Ask::Host {
                len,
                flags: self.random.pick(&[0, 1, 2, 3]).unwrap_or(0),
            },
            12..14 => Ask::Registered {
                len,
                offset: self.random.pick(&[0, 0, 64, 4092]).unwrap_or(0),
            },
            14 if self.has_managed => Ask::Managed { len },
            14 => Ask::Device { len },
            _ => Ask::Virtual {
                units: 1 + self.random.below(2),
                views: self.random.between(1, 3),
                keeps: self.random.once_in(2),
            },
        };
        if used + len.max(2 << 20) > MOST || self.buffers.len() > 40 {
            return Ok(());
        }
        let number = self.new_number();
        self.note(|| format!("buffer {number}: {ask:?}"));
        let buffer = Buffer::new(ask)?;
        let len = buffer.content.len();
        self.buffers.insert(number, buffer);
        // Nothing says what fresh memory holds.
        let user = if matches!(ask, Ask::Pool { .. }) {
            stream
        } else {
            LEGACY
        };
        let to = Place {
            buffer: number,
            view: 0,
            at: 0,
        };
        let (value, size) = (
            self.random.word(),
            Rows {
                width: len,
                rows: 1,
            },
        );
        let act = Act::Set {
            to,
            pitch: 0,
            element: 1,
            value,
            size,
        };
        self.submit(&act, user, Form::Stream)
    }

    fn free(&mut self) -> Status {
        let Some(number) = self.a_buffer(|buffer| !buffer.is_variable()) else {
            return Ok(());
        };
        let stream = self.a_stream();
        let waits = self.random.once_in(2);
        self.note(|| format!("free {number} in stream {stream}, waits {waits}"));
        self.destroy_graphs(|recipe, images| recipe.buffers(images).contains(&number))?;
        let origin = self.buffers[&number].origin;
        match origin {
            Origin::Pool => self.hands.claim(&[number], stream, &self.streams)?,
            Origin::Device if !waits => {}
            _ => self.await_user(number)?,
        }
        let buffer = self.buffers.remove(&number).expect("a buffer");
        let address = buffer.views[0];
        buffer.free(self.streams.handle(stream))?;
        self.hands.forget(number);
        match origin {
            Origin::Device => is_gone(address),
            _ => Ok(()),
        }
    }

    /// Waits for the work that uses a buffer.
    fn await_user(&mut self, buffer: u32) -> Status {
        let Some(user) = self.hands.user(buffer) else {
            return Ok(());
        };
        call!(cuStreamSynchronize, self.streams.handle(user))?;
        self.hands.forget(buffer);
        Ok(())
    }

    fn write_by_host(&mut self) -> Status {
        let Some(number) = self.a_buffer(|buffer| buffer.host.is_some()) else {
            return Ok(());
        };
        let Some((to, len)) = self.part(number, 1) else {
            return Ok(());
        };
        self.note(|| format!("the processor writes {len} bytes to {to:?}"));
        let bytes = self.random.bytes(len.min(64 << 10));
        self.await_user(number)?;
        let buffer = self.buffers.get_mut(&number).expect("a buffer");
        let range = to.at..to.at + bytes.len();
        buffer.bytes().expect("host memory")[range.clone()].copy_from_slice(&bytes);
        buffer.content[range].copy_from_slice(&bytes);
        Ok(())
    }

    fn read_by_host(&mut self) -> Status {
        let Some(number) = self.a_buffer(|buffer| buffer.host.is_some()) else {
            return Ok(());
        };
        self.note(|| format!("the processor reads {number}"));
        self.await_user(number)?;
        let buffer = self.buffers.get_mut(&number).expect("a buffer");
        let expected = buffer.content.clone();
        let found = buffer.bytes().expect("host memory");
        same_bytes(
            || format!("buffer {number}, by the processor"),
            found,
            &expected,
        )
    }

    /// A copy from pageable memory, which may be changed once the call has returned.
    fn copy_in(&mut self) -> Status {
        let Some(number) = self.a_buffer(|_| true) else {
            return Ok(());
        };
        let Some((to, len)) = self.part(number, 1) else {
            return Ok(());
        };
        let stream = self.a_stream();
        let is_plain = stream == LEGACY && self.random.once_in(2);
        let mut bytes = self.random.bytes(len);
        self.note(|| format!("{len} bytes to {to:?} in stream {stream}, plain {is_plain}"));
        self.hands.claim(&[number], stream, &self.streams)?;
        let (address, handle) = (to.address(&self.buffers), self.streams.handle(stream));
        match is_plain {
            true => call!(cuMemcpyHtoD_v2, address, bytes.as_ptr(), len)?,
            false => call!(cuMemcpyHtoDAsync_v2, address, bytes.as_ptr(), len, handle)?,
        }
        let buffer = self.buffers.get_mut(&number).expect("a buffer");
        buffer.content[to.at..to.at + len].copy_from_slice(&bytes);
        bytes.fill(0xee);
        std::hint::black_box(&bytes);
        Ok(())
    }

    fn copy_out(&mut self) -> Status {
        let Some(number) = self.a_buffer(|_| true) else {
            return Ok(());
        };
        let Some((from, len)) = self.part(number, 1) else {
            return Ok(());
        };
        let stream = self.a_stream();
        let is_plain = stream == LEGACY && self.random.once_in(2);
        self.note(|| format!("{len} bytes from {from:?} in stream {stream}, plain {is_plain}"));
        self.hands.claim(&[number], stream, &self.streams)?;
        let (address, handle) = (from.address(&self.buffers), self.streams.handle(stream));
        let expected = self.buffers[&number].content[from.at..from.at + len].to_vec();
        let mut found = vec![0u8; len];
        let to = found.as_mut_ptr();
        if is_plain {
            call!(cuMemcpyDtoH_v2, to, address, len)?;
            return same_bytes(|| format!("a copy from buffer {number}"), &found, &expected);
        }
        call!(cuMemcpyDtoHAsync_v2, to, address, len, handle)?;
        self.pending.push(Pending { found, expected });
        Ok(())
    }

    fn create_stream(&mut self) -> Status {
        if self.streams.own().len() >= 6 {
            return Ok(());
        }
        let number = self.new_number();
        let flags = self
            .random
            .pick(&[CU_STREAM_DEFAULT, CU_STREAM_NON_BLOCKING])
            .unwrap_or(0);
        let wants_priority = self.random.once_in(3);
        self.note(|| {
            format!(
                "stream {}: flags {flags}, priority {wants_priority}",
                number + 2
            )
        });
        self.streams.create(number, flags, wants_priority)
    }

    fn destroy_stream(&mut self) -> Status {
        let own = self.streams.own();
        let Some(number) = self.random.pick(&own) else {
            return Ok(());
        };
        self.note(|| format!("destroy stream {number}"));
        self.hands.leave(number, &self.streams)?;
        // An instance that was captured in it has to be captured in others if it is updated.
        for exec in self.execs.values_mut() {
            forget_stream(&mut exec.recipe, number);
        }
        for graph in self.graphs.values_mut() {
            forget_stream(&mut graph.recipe, number);
        }
        self.streams.destroy(number)
    }

    fn wait(&mut self) -> Status {
        let stream = self.a_stream();
        match self.random.below(4) {
            0 => self.rest(),
            1 => {
                let other = self.a_stream();
                let (from, to) = (self.streams.handle(stream), self.streams.handle(other));
                self.note(|| format!("stream {other} waits for {stream}"));
                self.hands.order(from, to)
            }
            _ => {
                self.note(|| format!("wait for stream {stream}"));
                call!(cuStreamSynchronize, self.streams.handle(stream))
            }
        }
    }

    fn load(&mut self, has_code: bool) -> Status {
        let is_library = self.random.once_in(2);
        let number = self.new_number();
        // Some have the same text as an earlier one.
        let text = match self.random.once_in(4) {
            true => self.random.below(8) as u32,
            false => self.random.word(),
        };
        if self.images.len() >= 6 {
            return Ok(());
        }
        self.note(|| format!("image {number}: text {text}, library {is_library}, code {has_code}"));
        let (mut image, variables) = Image::load(text, is_library, has_code)?;
        for variable in variables {
            let own = self.new_number();
            image.variables.push(own);
            let name = variable.name;
            self.note(|| format!("buffer {own} is {name:?} of image {number}"));
            let buffer = Buffer {
                origin: Origin::Variable {
                    image: number,
                    name,
                },
                views: vec![variable.address],
                host: None,
                content: variable.content,
            };
            self.buffers.insert(own, buffer);
        }
        self.images.insert(number, image);
        Ok(())
    }

    fn unload(&mut self) -> Status {
        let numbers: Vec<u32> = self.images.keys().copied().collect();
        let Some(number) = self.random.pick(&numbers) else {
            return Ok(());
        };
        self.note(|| format!("unload image {number}"));
        let variables = self.images[&number].variables.clone();
        self.destroy_graphs(|recipe, images| {
            let buffers = recipe.buffers(images);
            recipe.uses_image(number) || variables.iter().any(|variable| buffers.contains(variable))
        })?;
        self.rest()?;
        for variable in &variables {
            self.buffers.remove(variable);
        }
        self.images.remove(&number).expect("an image").unload()
    }

    /// Some operations with at most so many inside, for a graph.
    fn acts(&mut self, most: usize, has_children: bool) -> Vec<Act> {
        let count = self.random.between(1, most);
        let one = |walk: &mut Walk| match has_children && walk.random.once_in(8) {
            true => {
                let mut inner = walk.acts(3, false);
                inner.retain(|act| walk.binds || !act.is_host());
                (!inner.is_empty()).then_some(Act::Child(inner))
            }
            false => walk.act(true),
        };
        (0..count).filter_map(|_| one(self)).collect()
    }

    fn make_graph(&mut self) -> Status {
        let is_built = self.random.once_in(2);
        let acts = self.acts(8, is_built);
        let both = [self.capturing(), self.capturing()];
        let forks = both[0] != both[1] && acts.len() > 2;
        if self.graphs.len() >= 5 || acts.is_empty() {
            return Ok(());
        }
        let made = match (is_built, both) {
            (false, [Some(first), Some(second)]) => Made::Captured([first, second], forks),
            _ => Made::Built,
        };
        let number = self.new_number();
        let recipe = Recipe { acts, made };
        self.note(|| format!("graph {number}: {:?} {:?}", recipe.made, recipe.acts));
        let graph = self.make(recipe)?;
        self.graphs.insert(number, graph);
        Ok(())
    }

    fn make(&mut self, recipe: Recipe) -> Status<Graph> {
        let (streams, buffers, images) = (&self.streams, &self.buffers, &self.images);
        recipe.make(
            self.context,
            streams,
            buffers,
            images,
            &mut self.capture_hands,
        )
    }

    /// A stream that may capture; the legacy stream may not.
    fn capturing(&mut self) -> Option<u32> {
        let own = self.streams.own();
        self.random.pick(&own)
    }

    fn instantiate(&mut self) -> Status {
        let clones = self.random.once_in(4);
        let Some(graph) = pick_key(&mut self.random, &self.graphs) else {
            return Ok(());
        };
        if self.execs.len() >= 6 {
            return Ok(());
        }
        let number = self.new_number();
        self.note(|| format!("instance {number} of graph {graph}, of a clone {clones}"));
        let exec = self.graphs[&graph].instantiate(graph, clones)?;
        self.execs.insert(number, exec);
        Ok(())
    }

    fn launch_graph(&mut self) -> Status {
        let stream = self.a_stream();
        let Some(number) = pick_key(&mut self.random, &self.execs) else {
            return Ok(());
        };
        self.note(|| format!("launch instance {number} in stream {stream}"));
        let exec = &self.execs[&number];
        let buffers = exec.recipe.buffers(&self.images);
        self.hands.claim(&buffers, stream, &self.streams)?;
        call!(cuGraphLaunch, exec.exec, self.streams.handle(stream))?;
        for (act, enabled) in exec.recipe.acts.iter().zip(&exec.enabled) {
            if *enabled {
                act.apply(&mut self.buffers, &self.images);
            }
        }
        Ok(())
    }

    /// Gives a node of an instance other parameters, or takes it out or in.
    fn change_instance(&mut self) -> Status {
        let Some(number) = pick_key(&mut self.random, &self.execs) else {
            return Ok(());
        };
        let exec = self.execs.get_mut(&number).expect("an instance");
        let at = self.random.below(exec.recipe.acts.len());
        let (toggles, act) = (self.random.once_in(3), &mut exec.recipe.acts[at]);
        let Some(of) = exec.of else {
            return Ok(());
        };
        if matches!(act, Act::Child(_) | Act::Empty) {
            return Ok(());
        }
        let node = self.graphs[&of].nodes[at];
        if toggles && !act.is_host() {
            exec.enabled[at] ^= true;
            let enabled = u32::from(exec.enabled[at]);
            self.note(|| format!("node {at} of instance {number} is enabled: {enabled}"));
            let exec = self.execs[&number].exec;
            return call!(cuGraphNodeSetEnabled, exec, node, enabled);
        }
        act.vary(&mut self.random);
        let act = act.clone();
        self.note(|| format!("node {at} of instance {number} becomes {act:?}"));
        let exec = self.execs[&number].exec;
        act.set_in(exec, node, self.context, &self.buffers, &self.images)
    }

    /// Gives a kernel node of a graph without instances other parameters.
    fn change_graph(&mut self) -> Status {
        let Some(number) = pick_key(&mut self.random, &self.graphs) else {
            return Ok(());
        };
        let has_instances = self.execs.values().any(|exec| exec.of == Some(number));
        let graph = self.graphs.get_mut(&number).expect("a graph");
        if graph.nodes.is_empty() || has_instances {
            return Ok(());
        }
        let at = self.random.below(graph.nodes.len());
        let (node, act) = (graph.nodes[at], &mut graph.recipe.acts[at]);
        if let Act::Launch(launch) = act {
            (launch.a, launch.b) = (self.random.word(), self.random.word());
            let launch = launch.clone();
            self.note(|| format!("node {at} of graph {number} becomes {launch:?}"));
            launch.with_node(&self.buffers, &self.images, |params| {
                call!(cuGraphKernelNodeSetParams_v2, node, params)
            })?;
        }
        Ok(())
    }

    fn update_instance(&mut self) -> Status {
        let Some(number) = pick_key(&mut self.random, &self.execs) else {
            return Ok(());
        };
        let exec = &self.execs[&number];
        let is_whole = exec.enabled.iter().all(|enabled| *enabled);
        // An instance that calls the host, updated by another graph, binds the session while its own graph exists.
        let binds = exec
            .from
            .is_some_and(|graph| self.graphs.contains_key(&graph))
            && exec.recipe.acts.iter().any(Act::is_host);
        if !is_whole || binds && !self.binds {
            return Ok(());
        }
        let mut recipe = exec.recipe.clone();
        recipe
            .acts
            .iter_mut()
            .for_each(|act| act.vary(&mut self.random));
        let is_lost = matches!(recipe.made, Made::Once);
        if is_lost {
            return Ok(());
        }
        self.note(|| format!("instance {number} becomes {:?}", recipe.acts));
        let graph = self.make(recipe)?;
        self.execs
            .get_mut(&number)
            .expect("an instance")
            .update(graph)
    }

    fn destroy_graph(&mut self) -> Status {
        let of_instance = self.random.once_in(2);
        if of_instance {
            let Some(number) = pick_key(&mut self.random, &self.execs) else {
                return Ok(());
            };
            self.note(|| format!("destroy instance {number}"));
            let exec = self.execs.remove(&number).expect("an instance");
            return call!(cuGraphExecDestroy, exec.exec);
        }
        let Some(number) = pick_key(&mut self.random, &self.graphs) else {
            return Ok(());
        };
        self.note(|| format!("destroy graph {number}"));
        self.remove_graph(number)
    }

    fn remove_graph(&mut self, number: u32) -> Status {
        let graph = self.graphs.remove(&number).expect("a graph");
        for exec in self.execs.values_mut() {
            if exec.of == Some(number) {
                exec.of = None;
            }
        }
        graph.destroy().map(drop)
    }

    /// Destroys the graphs and instances that use something.
    fn destroy_graphs(&mut self, uses: impl Fn(&Recipe, &Images) -> bool) -> Status {
        let used = |recipe: &Recipe| uses(recipe, &self.images);
        let those = self.execs.iter().filter(|(_, exec)| used(&exec.recipe));
        let execs: Vec<u32> = those.map(|(number, _)| *number).collect();
        let those = self.graphs.iter().filter(|(_, graph)| used(&graph.recipe));
        let graphs: Vec<u32> = those.map(|(number, _)| *number).collect();
        for number in execs {
            self.note(|| format!("destroy instance {number}"));
            let exec = self.execs.remove(&number).expect("an instance");
            call!(cuGraphExecDestroy, exec.exec)?;
        }
        for number in graphs {
            self.note(|| format!("destroy graph {number}"));
            self.remove_graph(number)?;
        }
        Ok(())
    }

    /// The stack size is changed only while no instance exists: natively, instances of before fail with
    /// `CUDA_ERROR_LAUNCH_FAILED` (driver 580.159.04).
    fn limit(&mut self) -> Status {
        if !self.execs.is_empty() {
            return Ok(());
        }
        let bytes = self.random.pick(&[1024usize, 2048, 4096]).unwrap_or(1024);
        self.note(|| format!("stack size {bytes}"));
        call!(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, bytes)?;
        self.stack = Some(bytes);
        Ok(())
    }

    fn pool(&mut self) -> Status {
        let (at, value) = (self.random.below(3), self.random.below(64));
        let choice = self.random.below(4);
        if self.pools.len() <= at {
            self.note(|| "a pool".into());
            self.pools.push(Pool::new()?);
            return Ok(());
        }
        self.note(|| format!("pool {at}: choice {choice}, {value}"));
        match choice {
            0 => {
                let pool = self.pools.remove(at).pool;
                call!(cuMemPoolDestroy, pool)
            }
            1 => self.pools[at].set_threshold((value as u64) << 20),
            2 => {
                let which = 1 + value as u32 % 3;
                self.pools[at].set_reuse(which, value % 2 == 0)
            }
            _ => call!(cuMemPoolTrimTo, self.pools[at].pool, value << 20),
        }
    }

    fn span(&mut self) -> Status {
        let (at, stream) = (self.random.below(4), self.a_stream());
        let ends = self.random.once_in(8);
        if self.spans.len() <= at {
            self.spans.push(Span::new()?);
            return Ok(());
        }
        self.note(|| format!("times {at}: stream {stream}, ends {ends}"));
        match ends {
            true => self.spans.remove(at).destroy(),
            false => self.spans[at].record(self.streams.handle(stream)),
        }
    }

    fn query(&mut self) -> Status {
        let stream = self.a_stream();
        let status = mpsshim_tests::cu!(cuStreamQuery, self.streams.handle(stream));
        if status != CUDA_SUCCESS && status != CUDA_ERROR_NOT_READY {
            return Err(crate::calls::Trouble::Call("cuStreamQuery", status));
        }
        let (mut free, mut total) = (0usize, 0usize);
        call!(cuMemGetInfo_v2, &mut free, &mut total)?;
        same(
            || "no more memory is free than there is".into(),
            free <= total,
            true,
        )
    }

    /// No two textures have the same number.
    fn check_textures(&self) -> Status {
        let textures = self.arrays.iter().flat_map(|array| &array.textures);
        let all: Vec<u64> = textures.map(|texture| texture.0).collect();
        let different: BTreeSet<u64> = all.iter().copied().collect();
        let what = || "textures with numbers of their own".into();
        same(what, different.len(), all.len())
    }

    fn array(&mut self) -> Status {
        let at = self.random.below(3);
        let destroys = self.random.once_in(3);
        self.note(|| format!("array {at}, destroys {destroys}"));
        match (self.arrays.len() > at, destroys) {
            (false, _) => {
                let array = Array::new(&mut self.random)?;
                self.arrays.push(array);
                Ok(())
            }
            (true, true) => self.arrays.remove(at).destroy(),
            (true, false) => self.arrays[at].write(&mut self.random),
        }
    }
}

/// Whether the device has managed memory.
fn has_managed() -> Status<bool> {
    let mut found = 0i32;
    let (which, device) = (CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 0 as CUdevice);
    call!(cuDeviceGetAttribute, &mut found, which, device)?;
    Ok(found != 0)
}

fn pick_key<T>(random: &mut Random, from: &BTreeMap<u32, T>) -> Option<u32> {
    let keys: Vec<u32> = from.keys().copied().collect();
    random.pick(&keys)
}

/// A recipe that captured in a stream which is gone cannot be followed again.
fn forget_stream(recipe: &mut Recipe, stream: u32) {
    if matches!(recipe.made, Made::Captured(both, _) if both.contains(&stream)) {
        recipe.made = Made::Once;
    }
}
