//! Runs kernels: block by block, the threads of a block one after the other up to the next barrier.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant, UNIX_EPOCH};

use crate::ptx::code::*;
use crate::texture::Place;

/// Status codes of `cuda.h` that a kernel can end with.
const ILLEGAL_ADDRESS: u32 = 700;
const ASSERT: u32 = 710;
const STACK_ERROR: u32 = 714;
const MISALIGNED: u32 = 716;
const LAUNCH_FAILED: u32 = 719;

/// Backward branches that a thread takes before it looks up.
const SLICE: u32 = 1 << 14;
const MAX_DEPTH: usize = 1024;
/// Frame bytes for functions that a kernel calls, per thread.
const CALL_STACK: u32 = 32 << 10;
/// Bytes of each string of an assertion that are shown.
const ASSERTED: u64 = 4 << 10;

/// What a kernel may touch outside its block.
pub trait Memory: Sync {
    /// The device range around `address`: first byte and the one behind the last.
    fn span(&self, address: u64) -> Option<(u64, u64)>;
    /// Changes whenever a range went away.
    fn version(&self) -> u64;
    /// Whether the launch should end early because its context is lost.
    fn lost(&self) -> bool;
    /// `malloc` in a kernel: an address, or 0.
    fn malloc(&self, bytes: u64) -> u64;
    /// `free` in a kernel: whether the address was allocated.
    fn free(&self, start: u64) -> bool;
    /// `cudaGraphSetConditional`: whether the graph that runs has such a handle.
    fn set_condition(&self, _handle: u64, _value: u32) -> bool {
        false
    }
    /// The channels of an element of a texture as type `ty`, or the status of the fault.
    fn fetch(&self, _texture: u64, _ty: Ty, _at: [i64; 2]) -> Result<[u32; 4], u32> {
        Err(ILLEGAL_ADDRESS)
    }
    /// Bytes of a surface, the first one lowest, or the status of the fault.
    fn load(&self, _surface: u64, _place: &Place) -> Result<u128, u32> {
        Err(ILLEGAL_ADDRESS)
    }
    fn store(&self, _surface: u64, _place: &Place, _value: u128) -> Result<(), u32> {
        Err(ILLEGAL_ADDRESS)
    }
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
    pub memory: &'a dyn Memory,
    /// The multiprocessors it may use, a bit each; at least one.
    pub sms: u64,
}

impl Launch<'_> {
    /// The multiprocessor of a block: they take turns.
    fn sm_of(&self, [x, y, z]: [u32; 3]) -> u64 {
        let [width, height, _] = self.grid;
        let block =
            u64::from(x) + u64::from(width) * (u64::from(y) + u64::from(height) * u64::from(z));
        let nth = block % u64::from(self.sms.count_ones().max(1));
        let mut bits = (0..64).filter(|bit| self.sms & 1 << bit != 0);
        bits.nth(nth as usize).unwrap_or(0)
    }
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
    /// The line of the module's text where an assertion failed.
    asserted: Option<u32>,
}

/// Runs a launch to its end.
pub fn run(launch: &Launch<'_>) -> Result<(), Fault> {
    let kernel = &launch.program.functions[launch.kernel];
    let static_shared = kernel.shared_bytes.next_multiple_of(16);
    let shared_bytes = u64::from(static_shared) + u64::from(launch.dynamic_shared);
    let calls = if kernel.calls.is_empty() {
        0
    } else {
        CALL_STACK
    };
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
        asserted: None,
    };
    let meets = launch.program.meets(launch.kernel);
    let count = launch.block.iter().product::<u32>();
    let blocks = launch.grid.iter().map(|&n| u64::from(n)).product::<u64>();
    let mut block = runner.block(0, if meets { count } else { 1 });
    for n in 0..blocks {
        if launch.memory.lost() {
            return Ok(());
        }
        block.ctaid = runner.ctaid(n);
        runner.refresh();
        if meets {
            for linear in 0..count {
                runner.enter(&mut block, linear as usize, linear);
            }
            while block.threads.iter().any(|t| t.state != State::Done) {
                if !runner.turn(&mut block)? {
                    return Err(runner.stuck(&block));
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
        if let Some(line) = runner.asserted {
            return Err(Fault {
                status: ASSERT,
                line,
                address: 0,
            });
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

    fn stuck(&self, block: &Block) -> Fault {
        let waiting = block.threads.iter().find(|t| t.state == State::Met);
        let line = waiting.map_or(0, |t| self.line(t));
        Fault {
            status: LAUNCH_FAILED,
            line,
            address: 0,
        }
    }

    fn line(&self, t: &Thread) -> u32 {
        self.launch.program.functions[t.function]
            .lines
            .get(t.pc)
            .copied()
            .unwrap_or(0)
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
                Special::LaneBit => 1 << lane,
                Special::LanesBelow => (1 << lane) - 1,
                Special::SharedBase => shared,
                Special::DynamicShared => u64::from(self.static_shared),
                Special::DynamicSharedSize => u64::from(launch.dynamic_shared),
                Special::LocalBase => t.local.as_ptr() as u64,
                Special::FrameBase => u64::from(t.frame),
                Special::SmId => launch.sm_of(t.ctaid),
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
            let Some(meeting) = self.meeting(&warp[first]) else {
                continue;
            };
            let Some(mask_register) = meeting.mask() else {
                continue;
            };
            let (function, pc) = (warp[first].function, warp[first].pc);
            // A lane that is not in its own mask is undefined behaviour: it takes part all the same.
            let mask = warp[first].get(mask_register) as u32 | 1 << first;
            let lanes: Vec<usize> = (0..warp.len())
                .filter(|&l| mask >> l & 1 != 0 && warp[l].state != State::Done)
                .collect();
            if lanes.iter().all(|&l| {
                warp[l].state == State::Met && (warp[l].function, warp[l].pc) == (function, pc)
            }) {
                exchange(meeting, warp, &lanes);
                lanes.iter().for_each(|&lane| warp[lane].go_on());
                any = true;
            }
        }
        any
    }

    /// Opens the barriers at which everyone has arrived.
    fn meet_in_block(&self, block: &mut Block) -> bool {
        let mut waiting = [const { Vec::new() }; 16];
        for (n, t) in block.threads.iter().enumerate() {
            if let Some(Meeting::Barrier {
                id,
                count,
                vote,
                d,
                p,
            }) = self.meeting(t)
            {
                let holds = t.get(p) & 1 != 0;
                waiting[t.get(id) as usize & 15].push((
                    n,
                    t.get(count) as u32 as usize,
                    vote,
                    d,
                    holds,
                ));
            }
        }
        let live = block
            .threads
            .iter()
            .filter(|t| t.state != State::Done)
            .count();
        let mut any = false;
        for threads in waiting {
            let needed = threads
                .first()
                .map_or(0, |t| if t.1 == 0 { live } else { t.1 });
            if threads.len() < needed {
                continue;
            }
            let held = threads.iter().filter(|t| t.4).count();
            for &(n, _, vote, d, _) in &threads {
                block.threads[n].set(d, vote.result(held, threads.len(), 0));
                block.threads[n].go_on();
                any = true;
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
                return Err(Fault {
                    status: $status,
                    line: self.line(t),
                    address: $address,
                });
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
                Kind::Alu | Kind::Alu4 => (i.alu)(r, i),
                Kind::LdGlobal | Kind::LdShared | Kind::LdLocal | Kind::LdParam => {
                    let ty = Ty::ALL[usize::from(i.n)];
                    let at = match self.locate(i.kind, i, r.get(i.a), u64::from(ty.bytes()), t) {
                        Ok(at) => at,
                        Err((status, address)) => fault!(status, address),
                    };
                    // SAFETY: `locate` has checked that `at` is aligned and lies, as a whole, in memory that
                    // the kernel may touch. Others may write there at the same time, hence volatile.
                    let value = unsafe {
                        match ty {
                            Ty::U32 | Ty::F32 => u64::from(at.cast::<u32>().read_volatile()),
                            Ty::U64 | Ty::S64 | Ty::F64 => at.cast::<u64>().read_volatile(),
                            Ty::U8 | Ty::Pred => u64::from(at.read_volatile()),
                            Ty::U16 => u64::from(at.cast::<u16>().read_volatile()),
                            Ty::S8 => at.cast::<i8>().read_volatile() as u64,
                            Ty::S16 => at.cast::<i16>().read_volatile() as u64,
                            Ty::S32 => at.cast::<i32>().read_volatile() as u64,
                        }
                    };
                    r.set(i.d, value);
                }
                Kind::StGlobal | Kind::StShared | Kind::StLocal => {
                    let ty = Ty::ALL[usize::from(i.n)];
                    let at = match self.locate(i.kind, i, r.get(i.a), u64::from(ty.bytes()), t) {
                        Ok(at) => at,
                        Err((status, address)) => fault!(status, address),
                    };
                    let value = r.get(i.b);
                    // SAFETY: as for loads.
                    unsafe {
                        match ty.bytes() {
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
                Kind::Align => {
                    let address = r.get(i.a).wrapping_add(i.imm as u64);
                    if address & (u64::from(i.n) - 1) != 0 {
                        fault!(MISALIGNED, address);
                    }
                }
                Kind::AtomGlobal | Kind::AtomShared => {
                    let (ty, op) = (
                        Ty::ALL[usize::from(i.n & 15)],
                        AtomOp::ALL[usize::from(i.n >> 4)],
                    );
                    match self.locate(i.kind, i, r.get(i.a), u64::from(ty.bytes()), t) {
                        Ok(at) => r.set(i.d, atomic(at, op, ty, r.get(i.b), r.get(i.c))),
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
                    if t.frames.len() >= MAX_DEPTH
                        || u64::from(frame + callee.frame_bytes) > self.local_bytes
                    {
                        fault!(STACK_ERROR, 0);
                    }
                    for &(from, to, bytes) in &site.arguments {
                        t.copy(t.frame + from, frame + to, bytes);
                    }
                    let base = t.base + caller.registers;
                    t.frames.push(Frame {
                        function: t.function,
                        pc,
                        base: t.base,
                        frame: t.frame,
                    });
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
                    let Some(back) = t.frames.pop() else {
                        return Ok(Stop::Exit);
                    };
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
                    let time = match i.n {
                        0 => self.start.elapsed(),
                        _ => UNIX_EPOCH.elapsed().unwrap_or_default(),
                    };
                    r.set(i.d, time.as_nanos() as u64);
                }
                Kind::Fence => fence(Ordering::SeqCst),
                Kind::Sleep => {
                    std::thread::sleep(Duration::from_nanos(
                        (r.get(i.a) & 0xFFFF_FFFF).min(1_000_000),
                    ));
                }
                Kind::Trap => fault!(i.imm as u32, 0),
                Kind::Malloc | Kind::Free => {
                    let calls = &self.launch.program.functions[t.function].heap_calls;
                    let [argument, result] =
                        calls[i.imm as usize].map(|at| ((t.frame + at) / 8) as usize);
                    let argument = t.local[argument];
                    if i.kind == Kind::Malloc {
                        t.local[result] = self.launch.memory.malloc(argument);
                    } else if !self.launch.memory.free(argument) {
                        fault!(LAUNCH_FAILED, argument);
                    }
                }
                Kind::Condition => {
                    let calls = &self.launch.program.functions[t.function].heap_calls;
                    let [handle, value] = calls[i.imm as usize].map(|at| {
                        let at = (t.frame + at) as usize;
                        t.local[at / 8] >> (8 * (at % 8))
                    });
                    if !self.launch.memory.set_condition(handle, value as u32) {
                        fault!(LAUNCH_FAILED, handle);
                    }
                }
                Kind::Image => {
                    let image = &program.functions[t.function].images[i.imm as usize];
                    if let Err(status) = self.image(image, r) {
                        fault!(status, r.get(image.object));
                    }
                }
                Kind::Assert => {
                    t.pc = pc;
                    self.fail_assertion(t, i.imm as usize);
                    return Ok(Stop::Exit);
                }
            }
            pc += 1;
        }
    }

    /// Reads a texture, or reads or writes a surface; the status of the fault if that fails.
    fn image(&self, image: &Image, r: Regs) -> Result<(), u32> {
        let (memory, number) = (self.launch.memory, r.get(image.object));
        let at = image.at.map(|register| {
            let bits = r.get(register) as u32;
            match image.at_float {
                true => f32::from_bits(bits).floor() as i64,
                false => i64::from(bits as i32),
            }
        });
        let bits = 8 * image.ty.bytes();
        let part = u64::MAX >> (64 - bits);
        let parts = image.data.iter().zip((0..).step_by(bits as usize));
        let place = |outside| Place {
            at,
            bytes: image.data.len() as u64 * u64::from(image.ty.bytes()),
            outside,
        };
        match image.access {
            Access::Fetch => {
                let texel = memory.fetch(number, image.ty, at)?;
                for (register, channel) in image.data.iter().zip(texel) {
                    r.set(*register, channel.into());
                }
            }
            Access::Load(outside) => {
                let value = memory.load(number, &place(outside))?;
                parts.for_each(|(register, bit)| r.set(*register, (value >> bit) as u64 & part));
            }
            Access::Store(outside) => {
                let value = parts.fold(0, |value, (register, bit)| {
                    value | u128::from(r.get(*register) & part) << bit
                });
                memory.store(number, &place(outside), value)?;
            }
        }
        Ok(())
    }

    /// Writes the text of a failed assertion to the C library's standard error, as the driver does before any call returns
    /// the status.
    #[cold]
    fn fail_assertion(&mut self, t: &Thread, number: usize) {
        let arguments = self.launch.program.functions[t.function].assertions[number];
        let [message, file, line, function] = arguments.map(|at| {
            let at = (t.frame + at) as usize;
            t.local[at / 8] >> (8 * (at % 8))
        });
        let [message, file, function] = [message, file, function].map(|at| self.string(at, t));
        let ([bx, by, bz], [tx, ty, tz]) = (t.ctaid, t.tid);
        let text = format!(
            "{file}:{}: {function}: block: [{bx},{by},{bz}], thread: [{tx},{ty},{tz}] Assertion `{message}` failed.\n",
            line as u32
        );
        unsafe extern "C" {
            static stderr: *mut libc::FILE;
        }
        // SAFETY: the C library's stream, which it locks itself, and a buffer of this length.
        unsafe { libc::fwrite(text.as_ptr().cast(), 1, text.len(), stderr) };
        self.asserted = Some(self.line(t));
    }

    /// The string at a generic address, as far as it can be read.
    fn string(&mut self, address: u64, t: &Thread) -> String {
        let byte = |at: u64| {
            let place = self.find(address.wrapping_add(at), 1, 0, t).ok()?;
            // SAFETY: inside a range of the launch, as just found.
            Some(unsafe { place.read() }).filter(|byte| *byte != 0)
        };
        let bytes: Vec<u8> = (0..ASSERTED).map_while(byte).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Where `bytes` at an address of the instruction's space lie, or the status of the fault.
    #[inline(always)]
    fn locate(
        &mut self,
        kind: Kind,
        i: &Inst,
        base: u64,
        bytes: u64,
        t: &mut Thread,
    ) -> Result<*mut u8, (u32, u64)> {
        match kind {
            Kind::LdGlobal | Kind::StGlobal | Kind::AtomGlobal => {
                let address = base.wrapping_add(i.imm as u64);
                let (low, high) = self.spans[usize::from(i.slot)];
                if address >= low && address <= high - bytes && address & (bytes - 1) == 0 {
                    return Ok(address as *mut u8);
                }
                self.find(address, bytes, i.slot, t)
            }
            Kind::LdShared | Kind::StShared | Kind::AtomShared => {
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
    fn find(
        &mut self,
        address: u64,
        bytes: u64,
        slot: u8,
        t: &Thread,
    ) -> Result<*mut u8, (u32, u64)> {
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
            Some((low, high))
                if address >= low && high - low >= bytes && address <= high - bytes =>
            {
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
    /// Leaves the meeting where it stands.
    fn go_on(&mut self) {
        self.pc += 1;
        self.state = State::Ready;
    }
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
            Meeting::Warp { mask } | Meeting::Shuffle { mask, .. } | Meeting::Vote { mask, .. } => {
                Some(mask)
            }
            Meeting::Barrier { .. } => None,
        }
    }
}

/// One warp-wide operation between `lanes`, which all stand at it.
fn exchange(meeting: Meeting, warp: &mut [Thread], lanes: &[usize]) {
    match meeting {
        Meeting::Shuffle {
            mode,
            d,
            p,
            a,
            b,
            c,
            ..
        } => {
            let values: Vec<u64> = (0..32)
                .map(|l| warp.get(l).map_or(0, |t| t.get(a) & 0xFFFF_FFFF))
                .collect();
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
                let inside = if mode == Shuffle::Up {
                    from as i32 >= high as i32
                } else {
                    from <= high
                };
                let from = if inside { from & 31 } else { here };
                warp[lane].set(p, u64::from(inside));
                warp[lane].set(d, values[from as usize]);
            }
        }
        Meeting::Vote { vote, d, p, .. } => {
            let held = lanes.iter().filter(|&&l| warp[l].get(p) & 1 != 0);
            let mask = held.fold(0u64, |m, &l| m | 1 << l);
            let result = vote.result(mask.count_ones() as usize, lanes.len(), mask);
            lanes.iter().for_each(|&l| warp[l].set(d, result));
        }
        Meeting::Warp { .. } | Meeting::Barrier { .. } => {}
    }
}

/// Does an atomic operation and returns what was there before.
fn atomic(at: *mut u8, op: AtomOp, ty: Ty, b: u64, c: u64) -> u64 {
    macro_rules! update {
        ($atomic:ty, $word:ty, $signed:ty, $float:ty) => {{
            let (x, y) = (b as $word, c as $word);
            // SAFETY: the caller has checked that the place is aligned and may be touched; all others who
            // write it at the same time do so atomically or have a race of their own.
            let place = unsafe { <$atomic>::from_ptr(at.cast()) };
            let new = |old: $word| match op {
                AtomOp::Add if ty.is_float() => {
                    (<$float>::from_bits(old) + <$float>::from_bits(x)).to_bits()
                }
                AtomOp::Add => old.wrapping_add(x),
                AtomOp::Min if ty.is_signed() => (old as $signed).min(x as $signed) as $word,
                AtomOp::Max if ty.is_signed() => (old as $signed).max(x as $signed) as $word,
                AtomOp::Min => old.min(x),
                AtomOp::Max => old.max(x),
                AtomOp::Cas if old == x => y,
                AtomOp::Cas => old,
                AtomOp::Exch => x,
                AtomOp::And => old & x,
                AtomOp::Or => old | x,
                AtomOp::Xor => old ^ x,
                AtomOp::Inc if old >= x => 0,
                AtomOp::Inc => old + 1,
                AtomOp::Dec if old == 0 || old > x => x,
                AtomOp::Dec => old - 1,
            };
            let (set, fetch) = (Ordering::SeqCst, Ordering::SeqCst);
            u64::from(place.fetch_update(set, fetch, |old| Some(new(old))).unwrap_or_else(|old| old))
        }};
    }
    match ty.bytes() {
        4 => update!(AtomicU32, u32, i32, f32),
        _ => update!(AtomicU64, u64, i64, f64),
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
        fn malloc(&self, _: u64) -> u64 {
            0
        }
        fn free(&self, start: u64) -> bool {
            start == 0
        }
    }

    /// Runs kernel `k` of a body with registers to use; its one parameter is the address of eight zeroed words.
    fn run_body(body: &str, threads: u32) -> Result<Vec<u64>, Fault> {
        let text = format!(
            ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 out) {{\n\
             .reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .shared .align 8 .b8 s[64]; ld.param.u64 %rd1, [out];\n\
             {body}\nret; }}\n"
        );
        run_module(&text, threads)
    }

    fn run_module(text: &str, threads: u32) -> Result<Vec<u64>, Fault> {
        let program = parse(text).expect("a module");
        let memory = Buffer(vec![0; 8]);
        let launch = Launch {
            program: &program,
            kernel: program.kernel("k").expect("a kernel"),
            data: 0,
            params: &(memory.0.as_ptr() as u64).to_le_bytes(),
            grid: [1; 3],
            block: [threads, 1, 1],
            dynamic_shared: 0,
            memory: &memory,
            sms: 1,
        };
        run(&launch).map(|()| memory.0.clone())
    }

    fn fault(body: &str) -> (u32, u32) {
        let fault = run_body(body, 32).expect_err("a fault");
        (fault.status, fault.line)
    }

    #[test]
    fn faults_name_status_and_line() {
        assert_eq!(fault("st.global.u32 [%rd1+64], 1;"), (ILLEGAL_ADDRESS, 6));
        assert_eq!(fault("ld.shared.u32 %r1, [s+64];"), (ILLEGAL_ADDRESS, 6));
        assert_eq!(fault("st.shared.u32 [s+-4], 1;"), (ILLEGAL_ADDRESS, 6));
        assert_eq!(
            fault("st.global.v2.u32 [%rd1+4], {%r1, %r1};"),
            (MISALIGNED, 6)
        );
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
             st.global.v2.u32 [%rd1], {%r1, 5};",
            1,
        );
        assert_eq!(out.expect("no fault")[0], 41 | 5 << 32);
    }

    #[test]
    fn named_barriers_count_their_threads() {
        let body = "mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 32; @%p1 bra B;\n red.shared.add.u32 [s], 1; bar.sync 2, 32;\n\
                    B: bar.red.popc.u32 %r3, 0, %p1; ld.shared.u32 %r2, [s]; st.global.v2.u32 [%rd1], {%r2, %r3};";
        assert_eq!(run_body(body, 64).expect("no fault")[0], 32 | 32 << 32);
    }

    #[test]
    fn endless_recursion_ends_with_a_stack_error() {
        let text = ".version 8.0\n.target sm_90\n.address_size 64\n.func f(.param .b32 x) {\n\
                    { .param .b32 a; call f, (a); }\n ret; }\n\
                    .visible .entry k(.param .u64 out) {\n{ .param .b32 a; call f, (a); }\n ret; }\n";
        assert_eq!(
            run_module(text, 1).expect_err("a fault").status,
            STACK_ERROR
        );
    }
}
