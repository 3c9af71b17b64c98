"""Changes the code in small ways, one at a time, and sees whether a test notices. `testbed/mutants` starts it.

cargo-mutants lists the changes (mutants). All of them are compiled into one build, in a copy of the sources: each
place becomes `if on(N) { mutant } else { original }`, and an environment variable switches one on for each run of a
test. The tests also note which places they reach, so that only these run for a mutant. What cannot be
switched in this way (constants, code that then does not compile) is counted as not tried.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import time

import tree_sitter
import tree_sitter_rust

# The files with rules and protocols: all their mutants are tried. Of the others, a sample of places.
PROTOCOL_FILES = {
    "lease": ["*"],
    "node": ["core.rs", "lending.rs", "pressure.rs"],
    "pool": ["giving_up.rs", "session.rs", "stock.rs", "holder.rs", "joint.rs", "overflow.rs", "directory.rs", "folder.rs"],
    "file": ["rules.rs", "moving.rs", "rebuild.rs", "scrub.rs", "seal.rs", "row_write.rs", "witness.rs", "recovery.rs"],
}
# The simulations that exercise a crate's protocols, and the crates whose tests do.
SIMULATIONS = {"lease": ["pool"], "node": ["pool"], "pool": ["pool", "file"], "file": ["file"]}
TEST_CRATES = {"lease": ["lease"], "node": ["node"], "pool": ["pool", "file", "namdb"], "file": ["file"]}
SWITCH = "crate::mutants::on"
# A mutant such as `u64::MAX * 2` is an error that only a complete build shows. Switched on, it panics.
ALLOWED = "#![allow(arithmetic_overflow, unconditional_panic)]\n"
SWITCH_MODULE = """
/// Which mutant is switched on; notes which were asked for.
pub(crate) mod mutants {
    use std::fs::File;
    use std::io::Write;
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicBool, Ordering};

    static ON: LazyLock<usize> =
        LazyLock::new(|| std::env::var("FARPOOL_MUTANT").map_or(usize::MAX, |n| n.parse().expect("a number")));
    static REACHED: LazyLock<Option<File>> = LazyLock::new(|| {
        let path = std::env::var_os("FARPOOL_REACHED")?;
        Some(File::options().create(true).append(true).open(path).expect("the file of the places"))
    });
    static SEEN: [AtomicBool; 16384] = [const { AtomicBool::new(false) }; 16384];

    pub(crate) fn on(number: usize) -> bool {
        if let Some(reached) = &*REACHED
            && !SEEN[number].swap(true, Ordering::Relaxed)
        {
            let _ = (&*reached).write_all(format!("{number}\\n").as_bytes());
        }
        number == *ON
    }
}
"""
MARKER = re.compile(re.escape(SWITCH) + r"\((\d+)\)")
CONSTANT = {"const_item", "static_item", "array_type", "const_block", "enum_variant", "attribute_item", "const_parameter"}
# A mutant that makes a test run this many times as long as it does without counts as caught.
SLOW = 3
GRACE_S = 5
# How many tests of a crate, and seeds of a simulation, judge a mutant first.
QUICK_TESTS, QUICK_SEEDS = 16, 20
# A mutant may allocate without end.
MEMORY = 6 << 30


class Mutant:
    """One change: where, what, and how it is told apart in lists that outlive changes of other lines."""

    def __init__(self, number, crate, listed):
        self.number, self.crate, self.listed = number, crate, listed
        self.file, self.genre, self.replacement = listed["file"], listed["genre"], listed["replacement"]
        self.name = re.sub(r"^([^:]+):\d+:\d+: ", r"\1: ", listed["name"])
        self.place = ":".join(listed["name"].split(":")[:3])


def run(*command, **options):
    return subprocess.run(command, check=True, text=True, **options)


def select(crate, seed, sample):
    """The mutants of the crate's protocol files, and those of a sample of other places."""
    listed = json.loads(run("cargo", "mutants", "--list", "--json", "-p", f"farpool-{crate}", capture_output=True).stdout)
    protocol = PROTOCOL_FILES[crate]
    is_protocol = lambda entry: protocol == ["*"] or pathlib.Path(entry["file"]).name in protocol
    place = lambda entry: ":".join(entry["name"].split(":")[:3])
    others = sorted({place(entry) for entry in listed if not is_protocol(entry)})
    chosen = set(random.Random(seed).sample(others, min(sample, len(others))))
    return [entry for entry in listed if is_protocol(entry) or place(entry) in chosen]


class Source:
    """A source file, its syntax tree, and the mutants that are written into it."""

    PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_rust.language()))

    def __init__(self, path):
        self.text = path.read_bytes()
        self.root = self.PARSER.parse(self.text).root_node
        self.lines = [0]
        for line in self.text.split(b"\n"):
            self.lines.append(self.lines[-1] + len(line) + 1)
        self.edits = collections.defaultdict(list)

    def offset(self, at):
        start = self.lines[at["line"] - 1]
        line = self.text[start : self.lines[at["line"]]].decode()
        return start + len(line[: at["column"] - 1].encode())

    def add(self, mutant):
        """Finds the node that the mutant changes. False: this tool cannot switch such a mutant."""
        start, end = (self.offset(mutant.listed["span"][which]) for which in ("start", "end"))
        node = self.root.descendant_for_byte_range(start, max(start, end - 1))
        if mutant.genre == "FnValue":
            while node is not None and not (node.type == "block" and node.parent.type == "function_item"):
                node = node.parent
        elif mutant.genre == "BinaryOperator":
            node = node.parent if node.parent.type in ("binary_expression", "compound_assignment_expr") else None
        elif mutant.genre == "UnaryOperator":
            node = node.parent if node.parent.type == "unary_expression" else None
        elif mutant.genre == "MatchArm":
            while node is not None and node.type != "match_arm":
                node = node.parent
        elif mutant.genre == "MatchArmGuard":
            while node is not None and not (node.parent and node.parent.type == "match_pattern"):
                node = node.parent
        else:
            node = None
        if node is None or self.is_constant(node):
            return False
        self.edits[node.id].append(mutant)
        return True

    def is_constant(self, node):
        while node is not None:
            if node.type in CONSTANT:
                return True
            if node.type == "function_item":
                modifiers = next((child for child in node.children if child.type == "function_modifiers"), None)
                if modifiers is not None and b"const" in modifiers.text:
                    return True
            node = node.parent
        return False

    def render(self, dropped):
        """The file with all mutants that are not dropped."""
        return self.rendered(self.root, dropped).decode()

    def rendered(self, node, dropped):
        mutants = [mutant for mutant in self.edits.get(node.id, []) if mutant.number not in dropped]
        parts, at = [], node.start_byte
        for child in node.children:
            parts += [self.text[at : child.start_byte], self.rendered(child, dropped)]
            at = child.end_byte
        text = b"".join(parts) + self.text[at : node.end_byte]
        # A guard is an expression, too; its own mutants come first.
        for genre in sorted({mutant.genre for mutant in mutants}, key=lambda genre: genre == "MatchArmGuard"):
            text = self.switched(node, [mutant for mutant in mutants if mutant.genre == genre], text)
        return text

    def switched(self, node, mutants, original):
        on = lambda mutant: f"{SWITCH}({mutant.number})".encode()
        if mutants[0].genre == "FnValue":
            returns = b"".join(b" if %s { return %s; }" % (on(m), m.replacement.encode()) for m in mutants)
            return b"{" + returns + original[1:]
        if mutants[0].genre == "MatchArm":
            pattern = node.child_by_field_name("pattern")
            head = pattern.end_byte - node.start_byte
            if any(child.type == "if" for child in pattern.children):
                guard = original.index(b" if ") + 4
                arrow = original.index(b"=>", guard)
                return original[:guard] + b"!%s && (%s) " % (on(mutants[0]), original[guard:arrow]) + original[arrow:]
            return original[:head] + b" if !%s " % on(mutants[0]) + original[head:]
        if mutants[0].genre == "MatchArmGuard":
            for m in mutants:
                original = (b"(%s || (%s))" if m.replacement == "true" else b"(!%s && (%s))") % (on(m), original)
            return original
        if mutants[0].genre == "UnaryOperator":
            changed = [(on(mutants[0]), self.text[node.start_byte + 1 : node.end_byte])]
        else:
            operator = node.children[1]
            before, after = self.text[node.start_byte : operator.start_byte], self.text[operator.end_byte : node.end_byte]
            changed = [(on(m), before + m.replacement.encode() + after) for m in mutants]
        return b"(" + b"".join(b"if %s { %s } else " % both for both in changed) + b"{ " + original + b" })"


class Tree:
    """A copy of the sources with all mutants in it."""

    def __init__(self, root, mutants):
        self.root, self.mutants = root, {mutant.number: mutant for mutant in mutants}
        self.not_tried, self.sources = {}, {}
        for mutant in mutants:
            path = root / mutant.file
            source = self.sources.setdefault(mutant.file, Source(path))
            if not source.add(mutant):
                self.not_tried[mutant.number] = "cannot be switched"
        for crate in {mutant.crate for mutant in mutants}:
            self.sources.setdefault(f"crates/{crate}/src/lib.rs", Source(root / f"crates/{crate}/src/lib.rs"))

    def write(self):
        for file, source in self.sources.items():
            text = source.render(self.not_tried)
            (self.root / file).write_text(ALLOWED + text + SWITCH_MODULE if file.endswith("src/lib.rs") else text)

    def build(self, crates):
        """Compiles, leaves out what does not compile, and gives the test programs by crate."""
        for crate in crates:
            while errors := self.errors("cargo", "check", "-q", "--message-format=json", "-p", f"farpool-{crate}"):
                dropped = {self.blamed(error) for error in errors}
                print(f"   {crate}: {len(dropped)} do not compile", flush=True)
                self.not_tried.update(dict.fromkeys(dropped, "does not compile"))
                self.write()
        tests = {test for crate in crates for test in TEST_CRATES[crate]}
        packages = [argument for crate in sorted(tests) for argument in ("-p", f"farpool-{crate}")]
        build = ["cargo", "test", "-q", "--no-run", "--lib", *packages]
        programs = self.executables(*build, "--message-format=json")
        scenarios = ["cargo", "test", "-q", "--no-run", "-p", "farpool-sim", "--test", "scenarios", "--message-format=json"]
        return programs, self.executables(*scenarios)["scenarios"]

    def errors(self, *command):
        done = subprocess.run(command, cwd=self.root, text=True, capture_output=True)
        messages = [json.loads(line) for line in done.stdout.splitlines()]
        messages = [message["message"] for message in messages if message["reason"] == "compiler-message"]
        errors = [message for message in messages if message["level"] == "error" and message["spans"]]
        if done.returncode != 0 and not errors:
            sys.exit(f"cargo fails for another reason:\n{done.stderr}")
        return errors

    def blamed(self, error):
        """The mutant of an error is the one that is switched last before the place of the error. If the arms of a
        `match` are not all cases any more, the error is at its head, before the mutants."""
        span = next(span for span in error["spans"] if span["is_primary"])
        text = (self.root / span["file_name"]).read_bytes()
        if (error["code"] or {}).get("code") == "E0004":
            markers = [int(number) for number in MARKER.findall(text[span["byte_end"] :].decode(errors="ignore"))]
            markers = [number for number in markers if self.mutants[number].genre.startswith("MatchArm")][:1]
        else:
            markers = [int(number) for number in MARKER.findall(text[: span["byte_end"]].decode(errors="ignore"))]
        if not markers:
            sys.exit(f"an error that no mutant explains:\n{error['rendered']}")
        return markers[-1]

    def executables(self, *command):
        done = run(*command, cwd=self.root, stdout=subprocess.PIPE)
        artifacts = [json.loads(line) for line in done.stdout.splitlines()]
        return {
            artifact["target"]["name"].removeprefix("farpool_"): artifact["executable"]
            for artifact in artifacts
            if artifact["reason"] == "compiler-artifact" and artifact["executable"] and artifact["profile"]["test"]
        }


def limit():
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def passes(command, timeout, directory, **variables):
    """Runs a test program. A run beyond its time fails."""
    process = subprocess.Popen(
        command, cwd=directory, env=dict(os.environ, RUST_BACKTRACE="0", **variables), preexec_fn=limit,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    try:
        return process.wait(timeout) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


class Judge:
    """The tests and seeds, what each reaches, and how long it takes."""

    def __init__(self, root, programs, scenarios, seeds, directory):
        self.root, self.programs, self.scenarios, self.directory = root, programs, scenarios, directory
        self.seeds, self.explained = seeds, explained()
        self.tests = collections.defaultdict(list)  # mutant → [(seconds, crate, test)]
        self.reaching = collections.defaultdict(list)  # (scenario, mutant) → seeds
        self.seconds = {}  # scenario → mean time of a seed

    def observe(self, jobs, scenario_names):
        tests = []
        for crate, program in self.programs.items():
            listed = run(program, "--list", "--format=terse", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
            tests += [(crate, line.removesuffix(": test")) for line in listed.splitlines() if line.endswith(": test")]
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for crate, test, seconds, reached in pool.map(lambda test: self.observe_test(*test), tests):
                for mutant in reached or ():
                    self.tests[mutant].append((seconds, crate, test))
                if reached is None:
                    print(f"   the test {test} of {crate} fails with no mutant switched on; it judges nothing", flush=True)
            for scenario in scenario_names:
                began = time.monotonic()
                for seed, reached in enumerate(pool.map(lambda seed: self.observe_seed(scenario, seed), range(self.seeds))):
                    for mutant in reached:
                        self.reaching[scenario, mutant].append(seed)
                self.seconds[scenario] = (time.monotonic() - began) * jobs / self.seeds
        for tests in self.tests.values():
            tests.sort()

    def observed(self, name, command, **variables):
        file = self.directory / f"reached-{name}"
        file.unlink(missing_ok=True)
        began = time.monotonic()
        passed = passes(command, 300, self.root, FARPOOL_REACHED=str(file), **variables)
        seconds = time.monotonic() - began
        reached = {int(line) for line in file.read_text().split()} if file.exists() else set()
        file.unlink(missing_ok=True)
        return passed, seconds, reached

    def observe_test(self, crate, test):
        name = f"{crate}-{test.replace('::', '-')}"
        passed, seconds, reached = self.observed(name, [self.programs[crate], "--exact", test])
        return crate, test, seconds, reached if passed else None

    def simulation(self, scenario):
        return [self.scenarios, "--exact", f"{scenario}::seeds_are_green"]

    def observe_seed(self, scenario, seed):
        seeds = f"{seed},"
        passed, _, reached = self.observed(f"{scenario}-{seed}", self.simulation(scenario), FARPOOL_SIM_SEEDS=seeds)
        if not passed:
            print(f"   seed {seed} of sim {scenario} fails with no mutant switched on; it judges nothing", flush=True)
        return reached if passed else set()

    def verdict(self, mutant):
        """Who notices: first the quick tests and a few seeds, then the other tests, then the other seeds. These take by
        far the most time, so a mutant that the page explains is not judged by them."""
        reached = {scenario: self.reaching[scenario, mutant.number] for scenario in SIMULATIONS[mutant.crate]}
        if not self.tests_pass(mutant, slice(0, QUICK_TESTS)):
            return "tests"
        for scenario, seeds in reached.items():
            if not self.seeds_pass(mutant, scenario, seeds[:QUICK_SEEDS]):
                return f"sim {scenario}"
        if not self.tests_pass(mutant, slice(QUICK_TESTS, None)):
            return "tests"
        for scenario, seeds in () if mutant.name in self.explained else reached.items():
            if not self.seeds_pass(mutant, scenario, seeds[QUICK_SEEDS:]):
                return f"sim {scenario}, rare"
        tests = len(self.tests[mutant.number])
        return "MISSED, reached by " + ", ".join([f"{tests} tests"] + [f"{len(s)} seeds of {n}" for n, s in reached.items()])

    def seeds_pass(self, mutant, scenario, seeds):
        if not seeds:
            return True
        listed = ",".join(map(str, seeds)) + ","
        timeout = GRACE_S + SLOW * self.seconds[scenario] * len(seeds)
        return passes(
            self.simulation(scenario), timeout, self.root, FARPOOL_MUTANT=str(mutant.number), FARPOOL_SIM_SEEDS=listed
        )

    def tests_pass(self, mutant, chosen):
        """Runs some of each crate's tests that reach the mutant; the quickest come first."""
        for crate in TEST_CRATES[mutant.crate]:
            tests = [(seconds, test) for seconds, of, test in self.tests[mutant.number] if of == crate][chosen]
            # In groups, so that the quick ones may decide before the slow ones begin.
            for group in (tests[:4], tests[4:24], tests[24:]):
                timeout = GRACE_S + SLOW * sum(seconds for seconds, _ in group)
                command = [self.programs.get(crate, ""), "--exact", *(test for _, test in group)]
                if group and not passes(command, timeout, self.root, FARPOOL_MUTANT=str(mutant.number)):
                    return False
        return True


def explained():
    """The names of the mutants that the page lists, with the reason why no test notices them."""
    page = pathlib.Path("docs/src/mutants.md").read_text().replace("\\|", "|")
    return set(re.findall(r"^\| `(crates/.*?)` \| ", page, re.MULTILINE))


def copy_sources(root):
    """A copy of what git knows, with the times of unchanged files kept, so that a second build is quick."""
    root.mkdir(parents=True, exist_ok=True)
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", stdout=subprocess.PIPE).stdout
    for file in filter(None, listed.split("\0")):
        source, target = pathlib.Path(file), root / file
        if not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.write_bytes(source.read_bytes())
            target.chmod(source.stat().st_mode)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crates", nargs="*", metavar="CRATE", help=f"of {', '.join(PROTOCOL_FILES)}; all unless told")
    parser.add_argument("--seed", type=int, default=1, help="which sample of a crate's other places is taken (1)")
    parser.add_argument("--sample", type=int, default=200, help="how many other places are taken of a crate (200)")
    parser.add_argument("--sim-seeds", type=int, default=200, help="seeds of each simulation (200)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (one for each processor)")
    parser.add_argument("--only", default="", help="try only mutants whose names have this (a regular expression)")
    asked = parser.parse_args()
    crates = asked.crates or list(PROTOCOL_FILES)
    for crate in crates:
        if crate not in PROTOCOL_FILES:
            parser.error(f"no such crate: {crate}; there are: {', '.join(PROTOCOL_FILES)}")
    directory = pathlib.Path("target/mutants").absolute()
    copy_sources(directory / "tree")
    listed = [(crate, entry) for crate in crates for entry in select(crate, asked.seed, asked.sample)]
    mutants = [Mutant(number, crate, entry) for number, (crate, entry) in enumerate(listed)]
    print(f"== {len(mutants)} mutants; building", flush=True)
    tree = Tree(directory / "tree", mutants)
    tree.write()
    programs, scenarios = tree.build(crates)
    mutants = [mutant for mutant in mutants if mutant.number not in tree.not_tried]
    mutants = [mutant for mutant in mutants if re.search(asked.only, mutant.listed["name"])]
    print(f"== {len(mutants)} can be tried; which tests and seeds reach them?", flush=True)
    judge = Judge(directory / "tree", programs, scenarios, asked.sim_seeds, directory)
    judge.observe(asked.jobs, sorted({name for crate in crates for name in SIMULATIONS[crate]}))
    print("== judging", flush=True)
    verdicts = collections.defaultdict(list)
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool, open(directory / "verdicts.txt", "w") as results:
        for done, (mutant, verdict) in enumerate(pool.map(lambda m: (m, judge.verdict(m)), mutants)):
            verdicts[mutant.crate, verdict.split(",")[0]].append(mutant)
            print(f"{mutant.listed['name']}: {verdict}", file=results, flush=True)
            if done % 50 == 49:
                print(f"   {done + 1} of {len(mutants)}", flush=True)
    report(crates, mutants, verdicts, tree)


def report(crates, mutants, verdicts, tree):
    listed = explained()
    unexplained = 0
    for crate in crates:
        counts = {verdict: len(found) for (of, verdict), found in verdicts.items() if of == crate}
        not_tried = sum(tree.mutants[number].crate == crate for number in tree.not_tried)
        print(f"== {crate}: {counts}; not tried: {not_tried}")
        for mutant in verdicts[crate, "MISSED"]:
            if mutant.name not in listed:
                unexplained += 1
                print(f"not explained in docs/src/mutants.md: {mutant.listed['name']}")
    sys.exit(1 if unexplained else 0)


if __name__ == "__main__":
    main()
