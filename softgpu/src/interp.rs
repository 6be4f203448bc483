//! Runs kernels: block by block, the threads of a block one after the other to where they meet.

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use crate::ptx::code::*;

/// Status codes of `cuda.h` that a kernel can end with.
const ILLEGAL_ADDRESS: u32 = 700;
const STACK_ERROR: u32 = 714;
const MISALIGNED: u32 = 716;
const LAUNCH_FAILED: u32 = 719;

/// Backward branches that a thread takes before it looks up.
const SLICE: u32 = 1 << 14;
const MAX_DEPTH: usize = 1024;
/// Frame bytes for functions that a kernel calls, per thread.
const CALL_STACK: u32 = 32 << 10;

/// What a kernel may touch outside its block.
pub trait Memory: Sync {
    /// The device range around `address`: first byte and the one behind the last.
    fn span(&self, address: u64) -> Option<(u64, u64)>;
    /// Changes whenever a range went away.
    fn version(&self) -> u64;
    /// Whether the launch should end early because its context is lost.
    fn lost(&self) -> bool;
}

pub struct Launch<'a> {
    pub program: &'a Program,
    pub kernel: usize,
    /// Where the module's data lies.
    pub data: u64,
    pub params: &'a [u8],
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub dynamic_shared: u32,
    /// All blocks run at once, so that they can wait for each other.
    pub cooperative: bool,
    pub grid_id: u64,
    pub memory: &'a dyn Memory,
}

/// Why a launch ended early: the status, and the line of the module's text.
#[derive(Debug, PartialEq, Eq)]
pub struct Fault {
    pub status: u32,
    pub line: u32,
    pub address: u64,
}

enum Stop {
    Exit,
    Meet,
    Slice,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Ready,
    /// At a meeting, whose instruction the program counter shows.
    Met,
    Done,
}

struct Frame {
    function: usize,
    pc: usize,
    base: usize,
    frame: u32,
}

struct Thread {
    registers: Vec<u64>,
    local: Vec<u64>,
    frames: Vec<Frame>,
    function: usize,
    pc: usize,
    /// First register and first local byte of the running call.
    base: usize,
    frame: u32,
    tid: [u32; 3],
    ctaid: [u32; 3],
    linear: u32,
    state: State,
}

struct Block {
    ctaid: [u32; 3],
    shared: Vec<u64>,
    threads: Vec<Thread>,
    /// Threads that have arrived at a barrier without waiting there.
    arrived: [u32; 16],
}

struct Runner<'a> {
    launch: &'a Launch<'a>,
    /// Ranges that memory instructions found last, by their slot.
    spans: Box<[(u64, u64); 256]>,
    version: u64,
    shared_bytes: u64,
    static_shared: u32,
    local_bytes: u64,
    /// Parameters, padded to whole words.
    params: Vec<u64>,
    start: Instant,
    shared: *mut u8,
}

/// Runs a launch to its end.
pub fn run(launch: &Launch<'_>) -> Result<(), Fault> {
    let kernel = &launch.program.functions[launch.kernel];
    let static_shared = kernel.shared_bytes.next_multiple_of(16);
    let shared_bytes = u64::from(static_shared) + u64::from(launch.dynamic_shared);
    let calls = if kernel.calls.is_empty() { 0 } else { CALL_STACK };
    let mut params = vec![0u64; launch.params.len().div_ceil(8) + 1];
    for (n, byte) in launch.params.iter().enumerate() {
        params[n / 8] |= u64::from(*byte) << (8 * (n % 8));
    }
    let mut runner = Runner {
        launch,
        spans: Box::new([(u64::MAX, 8); 256]),
        version: launch.memory.version(),
        shared_bytes,
        static_shared,
        local_bytes: u64::from(kernel.frame_bytes.next_multiple_of(16) + calls),
        params,
        start: Instant::now(),
        shared: std::ptr::null_mut(),
    };
    let meets = launch.program.meets(launch.kernel);
    let count = launch.block.iter().product::<u32>();
    let blocks = launch.grid.iter().map(|&n| u64::from(n)).product::<u64>();
    if launch.cooperative {
        let mut all: Vec<Block> = (0..blocks).map(|n| runner.block(n, count)).collect();
        while all.iter().any(|b| b.threads.iter().any(|t| t.state != State::Done)) {
            let mut progress = false;
            for block in &mut all {
                progress |= runner.turn(block)?;
            }
            if !progress {
                return Err(runner.stuck(&all));
            }
        }
        return Ok(());
    }
    let mut block = runner.block(0, if meets { count } else { 1 });
    for n in 0..blocks {
        if launch.memory.lost() {
            return Ok(());
        }
        block.ctaid = runner.ctaid(n);
        block.arrived = [0; 16];
        runner.refresh();
        if meets {
            for linear in 0..count {
                runner.enter(&mut block, linear as usize, linear);
            }
            while block.threads.iter().any(|t| t.state != State::Done) {
                if !runner.turn(&mut block)? {
                    return Err(runner.stuck(std::slice::from_ref(&block)));
                }
                if launch.memory.lost() {
                    return Ok(());
                }
            }
        } else {
            runner.shared = block.shared.as_mut_ptr().cast();
            for linear in 0..count {
                runner.enter(&mut block, 0, linear);
                loop {
                    match runner.execute(&mut block.threads[0])? {
                        Stop::Exit => break,
                        Stop::Meet | Stop::Slice if launch.memory.lost() => return Ok(()),
                        Stop::Meet | Stop::Slice => runner.refresh(),
                    }
                }
            }
        }
    }
    Ok(())
}

impl<'a> Runner<'a> {
    fn ctaid(&self, n: u64) -> [u32; 3] {
        let [x, y, _] = self.launch.grid.map(u64::from);
        [(n % x) as u32, (n / x % y) as u32, (n / x / y) as u32]
    }

    fn block(&mut self, n: u64, threads: u32) -> Block {
        let thread = || Thread {
            registers: Vec::new(),
            local: vec![0; self.local_bytes.div_ceil(8) as usize],
            frames: Vec::new(),
            function: 0,
            pc: 0,
            base: 0,
            frame: 0,
            tid: [0; 3],
            ctaid: [0; 3],
            linear: 0,
            state: State::Ready,
        };
        let mut block = Block {
            ctaid: self.ctaid(n),
            shared: vec![0; self.shared_bytes.div_ceil(8) as usize],
            threads: (0..threads).map(|_| thread()).collect(),
            arrived: [0; 16],
        };
        for linear in 0..threads {
            self.enter(&mut block, linear as usize, linear);
        }
        block
    }

    /// Forgets remembered ranges if one of them may have gone away.
    fn refresh(&mut self) {
        let version = self.launch.memory.version();
        if version != self.version {
            self.version = version;
            self.spans.fill((u64::MAX, 8));
        }
    }

    fn stuck(&self, blocks: &[Block]) -> Fault {
        let waiting = blocks.iter().flat_map(|b| &b.threads).find(|t| t.state == State::Met);
        let line = waiting.map_or(0, |t| self.line(t));
        Fault { status: LAUNCH_FAILED, line, address: 0 }
    }

    fn line(&self, t: &Thread) -> u32 {
        self.launch.program.functions[t.function].lines.get(t.pc).copied().unwrap_or(0)
    }

    /// Makes thread `at` of the block start the kernel as thread number `linear`.
    fn enter(&mut self, block: &mut Block, at: usize, linear: u32) {
        let [x, y, _] = self.launch.block;
        let shared = block.shared.as_ptr() as u64;
        let t = &mut block.threads[at];
        t.tid = [linear % x, linear / x % y, linear / x / y];
        t.ctaid = block.ctaid;
        t.linear = linear;
        t.state = State::Ready;
        t.frames.clear();
        (t.function, t.pc, t.base, t.frame) = (self.launch.kernel, 0, 0, 0);
        let kernel = &self.launch.program.functions[self.launch.kernel];
        if t.registers.is_empty() {
            t.registers.resize(kernel.registers, 0);
            self.constants(t);
        }
        self.specials(t, shared);
    }

    fn constants(&self, t: &mut Thread) {
        for &(reg, value) in &self.launch.program.functions[t.function].constants {
            t.registers[t.base + usize::from(reg)] = match value {
                Constant::Bits(v) => v,
                Constant::Data(at) => self.launch.data.wrapping_add(at),
            };
        }
    }

    fn specials(&self, t: &mut Thread, shared: u64) {
        let lane = t.linear % 32;
        let launch = self.launch;
        for &(reg, special) in &launch.program.functions[t.function].specials {
            let axis = |v: [u32; 3], n: u8| u64::from(v[usize::from(n % 3)]);
            t.registers[t.base + usize::from(reg)] = match special {
                Special::Tid(n) => axis(t.tid, n),
                Special::Ntid(n) => axis(launch.block, n),
                Special::Ctaid(n) => axis(t.ctaid, n),
                Special::Nctaid(n) => axis(launch.grid, n),
                Special::LaneId => u64::from(lane),
                Special::WarpId => u64::from(t.linear / 32),
                Special::WarpCount => u64::from(launch.block.iter().product::<u32>().div_ceil(32)),
                Special::LaneMask(mask) => u64::from(match mask {
                    LaneMask::Eq => 1u32 << lane,
                    LaneMask::Lt => (1 << lane) - 1,
                    LaneMask::Le => (2u64 << lane) as u32 - 1,
                    LaneMask::Gt => !((2u64 << lane).wrapping_sub(1) as u32),
                    LaneMask::Ge => !((1 << lane) - 1),
                }),
                Special::SmCount => 4,
                Special::GridId => launch.grid_id,
                Special::SharedBase => shared,
                Special::SharedSize => self.shared_bytes,
                Special::DynamicShared => u64::from(self.static_shared),
                Special::DynamicSharedSize => u64::from(launch.dynamic_shared),
                Special::LocalBase => t.local.as_ptr() as u64,
                Special::LocalSize => self.local_bytes,
                Special::ParamBase => self.params.as_ptr() as u64,
                Special::ParamSize => launch.params.len() as u64,
                Special::FrameBase => u64::from(t.frame),
                Special::Zero => 0,
            };
        }
    }

    /// Lets every ready thread of a block run to where it has to wait, then lets those go on that may.
    /// Returns whether anything happened.
    fn turn(&mut self, block: &mut Block) -> Result<bool, Fault> {
        self.shared = block.shared.as_mut_ptr().cast();
        let mut progress = false;
        for warp in block.threads.chunks_mut(32) {
            loop {
                let mut ran = false;
                for t in warp.iter_mut().filter(|t| t.state == State::Ready) {
                    ran = true;
                    match self.execute(t)? {
                        Stop::Exit => t.state = State::Done,
                        Stop::Meet => t.state = State::Met,
                        Stop::Slice => self.refresh(),
                    }
                }
                progress |= ran;
                if !ran || !self.meet_in_warp(warp) {
                    break;
                }
            }
        }
        Ok(progress | self.meet_in_block(block))
    }

    fn meeting(&self, t: &Thread) -> Option<Meeting> {
        let function = &self.launch.program.functions[t.function];
        (t.state == State::Met).then(|| function.meetings[function.code[t.pc].imm as usize])
    }

    /// Completes the warp-wide operations whose lanes are all there.
    fn meet_in_warp(&self, warp: &mut [Thread]) -> bool {
        let mut any = false;
        for first in 0..warp.len() {
            let Some(meeting) = self.meeting(&warp[first]) else { continue };
            let Some(mask_register) = meeting.mask() else { continue };
            let (function, pc) = (warp[first].function, warp[first].pc);
            // A lane that is not in its own mask is undefined behaviour: it takes part all the same.
            let mask = warp[first].get(mask_register) as u32 | 1 << first;
            let lanes: Vec<usize> =
                (0..warp.len()).filter(|&l| mask >> l & 1 != 0 && warp[l].state != State::Done).collect();
            if lanes.iter().all(|&l| warp[l].state == State::Met && (warp[l].function, warp[l].pc) == (function, pc)) {
                exchange(meeting, warp, &lanes);
                for &lane in &lanes {
                    warp[lane].pc += 1;
                    warp[lane].state = State::Ready;
                }
                any = true;
            }
        }
        any
    }

    /// Opens the barriers at which everyone has arrived.
    fn meet_in_block(&self, block: &mut Block) -> bool {
        let mut any = false;
        let mut waiting = [const { Vec::new() }; 16];
        let mut live = 0;
        for n in 0..block.threads.len() {
            let t = &mut block.threads[n];
            live += u32::from(t.state != State::Done);
            let Some(meeting) = self.meeting(t) else { continue };
            match meeting {
                Meeting::Arrive { id, .. } => {
                    block.arrived[t.get(id) as usize & 15] += 1;
                    t.pc += 1;
                    t.state = State::Ready;
                    any = true;
                }
                Meeting::Barrier { id, count }
                | Meeting::BarrierCount { id, count, .. }
                | Meeting::BarrierAll { id, count, .. }
                | Meeting::BarrierAny { id, count, .. } => {
                    waiting[t.get(id) as usize & 15].push((n, t.get(count) as u32, meeting));
                }
                _ => {}
            }
        }
        for (id, threads) in waiting.iter().enumerate() {
            let Some(&(_, count, _)) = threads.first() else { continue };
            let needed = if count == 0 { live } else { count };
            if threads.len() as u32 + block.arrived[id] < needed {
                continue;
            }
            block.arrived[id] = 0;
            any = true;
            let holds = |p: u16, n: usize| block.threads[n].get(p) & 1 != 0;
            let result = match threads[0].2 {
                Meeting::BarrierCount { p, .. } => threads.iter().filter(|&&(n, ..)| holds(p, n)).count() as u64,
                Meeting::BarrierAll { p, .. } => u64::from(threads.iter().all(|&(n, ..)| holds(p, n))),
                Meeting::BarrierAny { p, .. } => u64::from(threads.iter().any(|&(n, ..)| holds(p, n))),
                _ => 0,
            };
            for &(n, _, meeting) in threads {
                let t = &mut block.threads[n];
                if let Meeting::BarrierCount { d, .. } | Meeting::BarrierAll { d, .. } | Meeting::BarrierAny { d, .. } =
                    meeting
                {
                    t.set(d, result);
                }
                t.pc += 1;
                t.state = State::Ready;
            }
        }
        any
    }

    /// Runs one thread to its end, a meeting, or the end of its slice.
    fn execute(&mut self, t: &mut Thread) -> Result<Stop, Fault> {
        let program = self.launch.program;
        let mut fuel = SLICE;
        let mut code = &program.functions[t.function].code[..];
        let mut r = Regs(t.registers[t.base..].as_mut_ptr());
        let mut pc = t.pc;
        macro_rules! fault {
            ($status:expr, $address:expr) => {{
                t.pc = pc;
                return Err(Fault { status: $status, line: self.line(t), address: $address });
            }};
        }
        macro_rules! jump {
            ($target:expr) => {{
                let target = $target as usize;
                if target <= pc {
                    fuel -= 1;
                    if fuel == 0 {
                        t.pc = target;
                        return Ok(Stop::Slice);
                    }
                }
                pc = target;
                continue;
            }};
        }
        loop {
            // SAFETY: `Function::check` made sure that branches stay inside and that the last instruction
            // does not fall through.
            let i = unsafe { code.get_unchecked(pc) };
            match i.kind {
                Kind::Alu => (i.alu)(r, i),
                Kind::LdGlobal | Kind::LdShared | Kind::LdLocal | Kind::LdParam => {
                    let width = Width::ALL[usize::from(i.n)];
                    let at = match self.locate(i.kind, i, r.get(i.a), width.bytes(), t) {
                        Ok(at) => at,
                        Err((status, address)) => fault!(status, address),
                    };
                    // SAFETY: `locate` has checked that `at` is aligned and lies, as a whole, in memory that
                    // the kernel may touch. Others may write there at the same time, hence volatile.
                    let value = unsafe {
                        match width {
                            Width::U32 => u64::from(at.cast::<u32>().read_volatile()),
                            Width::U64 => at.cast::<u64>().read_volatile(),
                            Width::U8 => u64::from(at.read_volatile()),
                            Width::U16 => u64::from(at.cast::<u16>().read_volatile()),
                            Width::S8 => at.cast::<i8>().read_volatile() as u64,
                            Width::S16 => at.cast::<i16>().read_volatile() as u64,
                            Width::S32 => at.cast::<i32>().read_volatile() as u64,
                        }
                    };
                    r.set(i.d, value);
                }
                Kind::StGlobal | Kind::StShared | Kind::StLocal => {
                    let width = Width::ALL[usize::from(i.n)];
                    let at = match self.locate(i.kind, i, r.get(i.a), width.bytes(), t) {
                        Ok(at) => at,
                        Err((status, address)) => fault!(status, address),
                    };
                    let value = r.get(i.b);
                    // SAFETY: as for loads.
                    unsafe {
                        match width.bytes() {
                            4 => at.cast::<u32>().write_volatile(value as u32),
                            8 => at.cast::<u64>().write_volatile(value),
                            2 => at.cast::<u16>().write_volatile(value as u16),
                            _ => at.write_volatile(value as u8),
                        }
                    }
                }
                Kind::Bra => jump!(i.imm),
                Kind::BraIf => {
                    if r.get(i.a) & 1 != 0 {
                        jump!(i.imm)
                    }
                }
                Kind::BraNot => {
                    if r.get(i.a) & 1 == 0 {
                        jump!(i.imm)
                    }
                }
                Kind::Brx => {
                    let table = &program.functions[t.function].tables[i.imm as usize];
                    match table.get(r.get(i.a) as u32 as usize) {
                        Some(&target) => jump!(target),
                        None => fault!(718, 0),
                    }
                }
                Kind::Align => {
                    let address = r.get(i.a).wrapping_add(i.imm as u64);
                    if address & (u64::from(i.n) - 1) != 0 {
                        fault!(MISALIGNED, address);
                    }
                }
                Kind::Atom => {
                    let atom = program.functions[t.function].atoms[i.imm as usize];
                    let bytes = match atom.ty {
                        AtomType::U16 => 2,
                        AtomType::U32 | AtomType::S32 | AtomType::F32 => 4,
                        _ => 8,
                    };
                    let kind = match atom.space {
                        Space::Shared => Kind::StShared,
                        Space::Local | Space::Param => Kind::StLocal,
                        Space::Global => Kind::StGlobal,
                    };
                    let probe = Inst { imm: atom.offset, slot: atom.slot, ..*i };
                    match self.locate(kind, &probe, r.get(atom.address), bytes, t) {
                        Ok(at) => r.set(atom.d, atomic(at, &atom, r.get(atom.b), r.get(atom.c))),
                        Err((status, address)) => fault!(status, address),
                    }
                }
                Kind::Meet => {
                    t.pc = pc;
                    return Ok(Stop::Meet);
                }
                Kind::Call => {
                    let caller = &program.functions[t.function];
                    let site = &caller.calls[i.imm as usize];
                    let callee = &program.functions[site.callee];
                    let frame = (t.frame + caller.frame_bytes).next_multiple_of(16);
                    if t.frames.len() >= MAX_DEPTH || u64::from(frame + callee.frame_bytes) > self.local_bytes {
                        fault!(STACK_ERROR, 0);
                    }
                    for &(from, to, bytes) in &site.arguments {
                        t.copy(t.frame + from, frame + to, bytes);
                    }
                    let base = t.base + caller.registers;
                    t.frames.push(Frame { function: t.function, pc, base: t.base, frame: t.frame });
                    if t.registers.len() < base + callee.registers {
                        t.registers.resize(base + callee.registers, 0);
                    }
                    (t.function, t.base, t.frame) = (site.callee, base, frame);
                    self.constants(t);
                    self.specials(t, self.shared as u64);
                    code = &callee.code;
                    r = Regs(t.registers[base..].as_mut_ptr());
                    pc = 0;
                    continue;
                }
                Kind::Ret => {
                    let Some(back) = t.frames.pop() else { return Ok(Stop::Exit) };
                    let (callee_frame, caller) = (t.frame, &program.functions[back.function]);
                    let site = &caller.calls[caller.code[back.pc].imm as usize];
                    for &(to, from, bytes) in &site.results {
                        t.copy(callee_frame + from, back.frame + to, bytes);
                    }
                    (t.function, t.base, t.frame) = (back.function, back.base, back.frame);
                    code = &caller.code;
                    r = Regs(t.registers[t.base..].as_mut_ptr());
                    pc = back.pc;
                }
                Kind::Exit => return Ok(Stop::Exit),
                Kind::Clock => {
                    let cycles = self.start.elapsed().as_nanos() as u64;
                    let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
                    let time = time.map_or(0, |t| t.as_nanos() as u64);
                    r.set(
                        i.d,
                        match i.n {
                            0 => cycles & 0xFFFF_FFFF,
                            1 => cycles >> 32,
                            2 => cycles,
                            3 => time,
                            4 => time & 0xFFFF_FFFF,
                            _ => time >> 32,
                        },
                    );
                }
                Kind::Fence => fence(Ordering::SeqCst),
                Kind::Sleep => {
                    std::thread::sleep(Duration::from_nanos((r.get(i.a) & 0xFFFF_FFFF).min(1_000_000)));
                }
                Kind::Trap => fault!(i.imm as u32, 0),
            }
            pc += 1;
        }
    }

    /// Where `bytes` at an address of the instruction's space lie, or the status of the fault.
    #[inline(always)]
    fn locate(&mut self, kind: Kind, i: &Inst, base: u64, bytes: u64, t: &mut Thread) -> Result<*mut u8, (u32, u64)> {
        match kind {
            Kind::LdGlobal | Kind::StGlobal => {
                let address = base.wrapping_add(i.imm as u64);
                let (low, high) = self.spans[usize::from(i.slot)];
                if address >= low && address <= high - bytes && address & (bytes - 1) == 0 {
                    return Ok(address as *mut u8);
                }
                self.find(address, bytes, i.slot, t)
            }
            Kind::LdShared | Kind::StShared => {
                let at = u64::from((base as u32).wrapping_add(i.imm as u32));
                let start = self.shared;
                check(at, bytes, self.shared_bytes)?;
                // SAFETY: inside the block's shared memory, as just checked.
                Ok(unsafe { start.add(at as usize) })
            }
            Kind::LdParam => {
                let at = u64::from((base as u32).wrapping_add(i.imm as u32));
                check(at, bytes, 8 * self.params.len() as u64)?;
                // SAFETY: inside the parameters, as just checked.
                Ok(unsafe { self.params.as_mut_ptr().cast::<u8>().add(at as usize) })
            }
            _ => {
                let at = u64::from((base as u32).wrapping_add(i.imm as u32));
                check(at, bytes, self.local_bytes)?;
                // SAFETY: inside the thread's local memory, as just checked.
                Ok(unsafe { t.local.as_mut_ptr().cast::<u8>().add(at as usize) })
            }
        }
    }

    /// Looks a generic address up: the windows of the block first, then the device's ranges.
    #[cold]
    fn find(&mut self, address: u64, bytes: u64, slot: u8, t: &Thread) -> Result<*mut u8, (u32, u64)> {
        if address & (bytes - 1) != 0 {
            return Err((MISALIGNED, address));
        }
        let windows = [
            (self.shared as u64, self.shared_bytes),
            (t.local.as_ptr() as u64, self.local_bytes),
            (self.params.as_ptr() as u64, 8 * self.params.len() as u64),
        ];
        for (start, size) in windows {
            if address >= start && address - start < size && size - (address - start) >= bytes {
                return Ok(address as *mut u8);
            }
        }
        match self.launch.memory.span(address) {
            Some((low, high)) if address >= low && high - low >= bytes && address <= high - bytes => {
                self.spans[usize::from(slot)] = (low, high);
                Ok(address as *mut u8)
            }
            _ => Err((ILLEGAL_ADDRESS, address)),
        }
    }
}

#[inline(always)]
fn check(at: u64, bytes: u64, size: u64) -> Result<(), (u32, u64)> {
    if at + bytes > size {
        Err((ILLEGAL_ADDRESS, at))
    } else if at & (bytes - 1) != 0 {
        Err((MISALIGNED, at))
    } else {
        Ok(())
    }
}

impl Thread {
    fn get(&self, register: u16) -> u64 {
        self.registers[self.base + usize::from(register)]
    }
    fn set(&mut self, register: u16, value: u64) {
        self.registers[self.base + usize::from(register)] = value;
    }
    /// Copies bytes between places of the local memory; both were placed by the compiler.
    fn copy(&mut self, from: u32, to: u32, bytes: u32) {
        for n in 0..bytes {
            let (from, to) = ((from + n) as usize, (to + n) as usize);
            let byte = self.local[from / 8] >> (8 * (from % 8)) & 0xFF;
            let word = &mut self.local[to / 8];
            *word = *word & !(0xFF << (8 * (to % 8))) | byte << (8 * (to % 8));
        }
    }
}

impl Meeting {
    /// The register of the lane mask, for meetings of a warp.
    fn mask(&self) -> Option<u16> {
        match *self {
            Meeting::Warp { mask }
            | Meeting::Shuffle { mask, .. }
            | Meeting::Ballot { mask, .. }
            | Meeting::All { mask, .. }
            | Meeting::Any { mask, .. }
            | Meeting::Uniform { mask, .. }
            | Meeting::MatchAny { mask, .. }
            | Meeting::MatchAll { mask, .. }
            | Meeting::Redux { mask, .. } => Some(mask),
            _ => None,
        }
    }
}

/// One warp-wide operation between `lanes`, which all stand at it.
fn exchange(meeting: Meeting, warp: &mut [Thread], lanes: &[usize]) {
    let word = |warp: &[Thread], lane: usize, reg: u16, wide: bool| {
        let v = warp[lane].get(reg);
        if wide { v } else { v & 0xFFFF_FFFF }
    };
    let votes =
        |warp: &[Thread], p: u16| lanes.iter().filter(|&&l| warp[l].get(p) & 1 != 0).fold(0u64, |m, &l| m | 1 << l);
    let all: u64 = lanes.iter().fold(0, |m, &l| m | 1 << l);
    match meeting {
        Meeting::Shuffle { mode, d, p, a, b, c, .. } => {
            let values: Vec<u64> = (0..32).map(|l| warp.get(l).map_or(0, |t| t.get(a) & 0xFFFF_FFFF)).collect();
            for &lane in lanes {
                let (by, c) = (warp[lane].get(b) as u32 & 31, warp[lane].get(c) as u32);
                let (clamp, segment) = (c & 31, c >> 8 & 31);
                let here = lane as u32;
                let low = here & segment;
                let high = low | clamp & !segment;
                let from = match mode {
                    Shuffle::Up => here.wrapping_sub(by),
                    Shuffle::Down => here + by,
                    Shuffle::Butterfly => here ^ by,
                    Shuffle::Index => low | by & !segment,
                };
                // Going up, the bound is a lower one.
                let inside = if mode == Shuffle::Up { from as i32 >= high as i32 } else { from <= high };
                let from = if inside { from & 31 } else { here };
                warp[lane].set(p, u64::from(inside));
                warp[lane].set(d, values[from as usize]);
            }
        }
        Meeting::Ballot { d, p, .. } => {
            let votes = votes(warp, p);
            lanes.iter().for_each(|&l| warp[l].set(d, votes));
        }
        Meeting::All { d, p, .. } => {
            let votes = votes(warp, p);
            lanes.iter().for_each(|&l| warp[l].set(d, u64::from(votes == all)));
        }
        Meeting::Any { d, p, .. } => {
            let votes = votes(warp, p);
            lanes.iter().for_each(|&l| warp[l].set(d, u64::from(votes != 0)));
        }
        Meeting::Uniform { d, p, .. } => {
            let votes = votes(warp, p);
            lanes.iter().for_each(|&l| warp[l].set(d, u64::from(votes == all || votes == 0)));
        }
        Meeting::MatchAny { d, a, wide, .. } => {
            let values: Vec<u64> = lanes.iter().map(|&l| word(warp, l, a, wide)).collect();
            for (n, &lane) in lanes.iter().enumerate() {
                let same =
                    lanes.iter().zip(&values).filter(|(_, v)| **v == values[n]).fold(0u64, |m, (l, _)| m | 1 << l);
                warp[lane].set(d, same);
            }
        }
        Meeting::MatchAll { d, p, a, wide, .. } => {
            let same = lanes.iter().all(|&l| word(warp, l, a, wide) == word(warp, lanes[0], a, wide));
            for &lane in lanes {
                warp[lane].set(p, u64::from(same));
                warp[lane].set(d, if same { all } else { 0 });
            }
        }
        Meeting::Redux { op, d, a, .. } => {
            let values = lanes.iter().map(|&l| warp[l].get(a) as u32);
            let result = match op {
                Reduce::Add => values.reduce(u32::wrapping_add),
                Reduce::Min => values.min(),
                Reduce::Max => values.max(),
                Reduce::MinSigned => values.map(|v| v as i32).min().map(|v| v as u32),
                Reduce::MaxSigned => values.map(|v| v as i32).max().map(|v| v as u32),
                Reduce::And => values.reduce(|x, y| x & y),
                Reduce::Or => values.reduce(|x, y| x | y),
                Reduce::Xor => values.reduce(|x, y| x ^ y),
            };
            lanes.iter().for_each(|&l| warp[l].set(d, u64::from(result.unwrap_or(0))));
        }
        _ => {}
    }
}

/// Does an atomic operation and returns what was there before.
fn atomic(at: *mut u8, atom: &Atom, b: u64, c: u64) -> u64 {
    macro_rules! update {
        ($atomic:ty, $word:ty, |$old:ident| $new:expr) => {{
            // SAFETY: the caller has checked that the place is aligned and may be touched; all others who
            // write it at the same time do so atomically or have a race of their own.
            let place = unsafe { <$atomic>::from_ptr(at.cast()) };
            let done = place.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |$old| Some($new));
            u64::from(done.unwrap_or_else(|old| old))
        }};
    }
    macro_rules! integer {
        ($atomic:ty, $word:ty, $signed:ty) => {{
            let (x, y) = (b as $word, c as $word);
            let signed = matches!(atom.ty, AtomType::S32 | AtomType::S64);
            update!($atomic, $word, |old| match atom.op {
                AtomOp::Add => old.wrapping_add(x),
                AtomOp::Min if signed => (old as $signed).min(x as $signed) as $word,
                AtomOp::Max if signed => (old as $signed).max(x as $signed) as $word,
                AtomOp::Min => old.min(x),
                AtomOp::Max => old.max(x),
                AtomOp::Exch => x,
                AtomOp::Cas =>
                    if old == x {
                        y
                    } else {
                        old
                    },
                AtomOp::And => old & x,
                AtomOp::Or => old | x,
                AtomOp::Xor => old ^ x,
                AtomOp::Inc =>
                    if old >= x {
                        0
                    } else {
                        old + 1
                    },
                AtomOp::Dec =>
                    if old == 0 || old > x {
                        x
                    } else {
                        old - 1
                    },
            })
        }};
    }
    match atom.ty {
        AtomType::U32 | AtomType::S32 => integer!(AtomicU32, u32, i32),
        AtomType::U64 | AtomType::S64 => integer!(AtomicU64, u64, i64),
        AtomType::U16 => integer!(AtomicU16, u16, i16),
        AtomType::F32 if atom.op == AtomOp::Exch => update!(AtomicU32, u32, |_old| b as u32),
        AtomType::F64 if atom.op == AtomOp::Exch => update!(AtomicU64, u64, |_old| b),
        AtomType::F32 => update!(AtomicU32, u32, |old| (f32::from_bits(old) + f32::from_bits(b as u32)).to_bits()),
        AtomType::F64 => update!(AtomicU64, u64, |old| (f64::from_bits(old) + f64::from_bits(b)).to_bits()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::parse;

    struct Buffer(Vec<u64>);
    impl Memory for Buffer {
        fn span(&self, address: u64) -> Option<(u64, u64)> {
            let start = self.0.as_ptr() as u64;
            let end = start + 8 * self.0.len() as u64;
            (address >= start && address < end).then_some((start, end))
        }
        fn version(&self) -> u64 {
            0
        }
        fn lost(&self) -> bool {
            false
        }
    }

    /// Runs kernel `k` of a body with registers to use; its one parameter is the address of eight zeroed words.
    fn run_body(body: &str, grid: u32, block: u32, cooperative: bool) -> Result<Vec<u64>, Fault> {
        let text = format!(
            ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 out) {{\n\
             .reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .shared .align 8 .b8 s[64]; ld.param.u64 %rd1, [out];\n\
             {body}\nret; }}\n"
        );
        run_module(&text, grid, block, cooperative)
    }

    fn run_module(text: &str, grid: u32, block: u32, cooperative: bool) -> Result<Vec<u64>, Fault> {
        let program = parse(text).expect("a module");
        let memory = Buffer(vec![0; 8]);
        let launch = Launch {
            program: &program,
            kernel: program.kernel("k").expect("a kernel"),
            data: 0,
            params: &(memory.0.as_ptr() as u64).to_le_bytes(),
            grid: [grid, 1, 1],
            block: [block, 1, 1],
            dynamic_shared: 0,
            cooperative,
            grid_id: 1,
            memory: &memory,
        };
        run(&launch).map(|()| memory.0.clone())
    }

    fn fault(body: &str) -> (u32, u32) {
        let fault = run_body(body, 1, 32, false).expect_err("a fault");
        (fault.status, fault.line)
    }

    #[test]
    fn tables_of_branch_targets() {
        let out = run_body(
            "mov.u32 %r1, %tid.x; mov.u32 %r2, 7;\n ts: .branchtargets A, B, C;\n brx.idx %r1, ts;\n\
             C: add.u32 %r2, %r2, 100; B: add.u32 %r2, %r2, 10; A: mad.wide.u32 %rd2, %r1, 8, %rd1; st.global.u32 [%rd2], %r2;",
            1,
            3,
            false,
        );
        assert_eq!(out.expect("no fault")[..3], [7, 17, 117]);
    }

    #[test]
    fn faults_name_status_and_line() {
        assert_eq!(fault("st.global.u32 [%rd1+64], 1;"), (ILLEGAL_ADDRESS, 6));
        assert_eq!(fault("ld.shared.u32 %r1, [s+64];"), (ILLEGAL_ADDRESS, 6));
        assert_eq!(fault("st.shared.u32 [s+-4], 1;"), (ILLEGAL_ADDRESS, 6));
        assert_eq!(fault("st.global.v2.u32 [%rd1+4], {%r1, %r1};"), (MISALIGNED, 6));
        assert_eq!(fault("\ntrap;"), (LAUNCH_FAILED, 7));
        // The end of the address space, where sums wrap.
        assert_eq!(fault("st.u32 [-4], 1;"), (ILLEGAL_ADDRESS, 6));
        // Nobody else comes to this barrier.
        assert_eq!(fault("bar.sync 1, 64;"), (LAUNCH_FAILED, 6));
    }

    #[test]
    fn generic_addresses_reach_shared_memory() {
        let out = run_body(
            "mov.u64 %rd2, s; cvta.shared.u64 %rd3, %rd2; st.u32 [%rd3+12], 41; ld.shared.u32 %r1, [s+12];\n\
             isspacep.shared %p1, %rd3; selp.u32 %r2, 1, 0, %p1; isspacep.global %p1, %rd3; selp.u32 %r3, 1, 0, %p1;\n\
             st.global.v4.u32 [%rd1], {%r1, %r2, %r3, 5};",
            1,
            1,
            false,
        );
        assert_eq!(out.expect("no fault")[..2], [41 | 1 << 32, 5 << 32]);
    }

    #[test]
    fn blocks_of_a_cooperative_launch_wait_for_each_other() {
        let body = "mov.u32 %r1, 1; atom.global.add.u32 %r2, [%rd1], %r1;\n\
                    L: ld.volatile.global.u32 %r3, [%rd1]; setp.lt.u32 %p1, %r3, 4; @%p1 bra L; red.global.add.u32 [%rd1+8], %r3;";
        assert_eq!(run_body(body, 4, 1, true).expect("no fault")[..2], [4, 16]);
    }

    #[test]
    fn barriers_may_be_reached_at_different_places() {
        let body = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 40; @%p1 bra A;\n bar.arrive 2, 64; bra B;\n\
                    A: red.shared.add.u32 [s], 1; bar.sync 2, 64; B: bar.sync 0; ld.shared.u32 %r2, [s]; st.global.u32 [%rd1], %r2;";
        assert_eq!(run_body(body, 1, 64, false).expect("no fault")[0], 40);
    }

    #[test]
    fn endless_recursion_ends_with_a_stack_error() {
        let text = ".version 8.0\n.target sm_90\n.address_size 64\n.func f(.param .b32 x) {\n\
                    { .param .b32 a; call f, (a); }\n ret; }\n\
                    .visible .entry k(.param .u64 out) {\n{ .param .b32 a; call f, (a); }\n ret; }\n";
        assert_eq!(run_module(text, 1, 1, false).expect_err("a fault").status, STACK_ERROR);
    }
}
