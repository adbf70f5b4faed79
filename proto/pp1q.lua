-- Wireshark and tshark read captures of PP1Q with this: named fields, digests checked, experts for what is wrong.
--   tshark -X lua_script:proto/pp1q.lua -r demo.pcapng
-- What a packet of a capture holds is described in pp1q_transport/capture/records.py, a frame in spec.md beside this file; the tables
-- here are compared with both by tests/capture. Runs on Lua 5.2 (Wireshark 4.0) to 5.4: numbers stay below 2^53, and a 64-bit word is
-- a pair (high, low) of 32-bit ones.

local pp1q = Proto("pp1q", "PP1Q transport")

-- 64-bit words ------------------------------------------------------------------------------------------------------------------

local bxor, band
if bit32 then
  bxor, band = bit32.bxor, bit32.band
else
  bxor = load("return function(a, b) return a ~ b end")()
  band = load("return function(a, b) return a & b end")()
end
local floor = math.floor
local WORD = 4294967296

local function add(ah, al, bh, bl)
  local low = al + bl
  local carry = low >= WORD and 1 or 0
  return (ah + bh + carry) % WORD, low % WORD
end

local function sub(ah, al, bh, bl)
  local low = al - bl
  local borrow = low < 0 and 1 or 0
  return (ah - bh - borrow) % WORD, low % WORD
end

local function xor(ah, al, bh, bl) return bxor(ah, bh), bxor(al, bl) end

-- 32 x 32 -> 64 bits
local function wide(a, b)
  local a0, b0 = a % 65536, b % 65536
  local a1, b1 = floor(a / 65536), floor(b / 65536)
  local mid = a1 * b0 + a0 * b1
  local low = a0 * b0 + (mid % 65536) * 65536
  return (a1 * b1 + floor(mid / 65536) + floor(low / WORD)) % WORD, low % WORD
end

-- the low 64 bits of a product
local function mul(ah, al, bh, bl)
  local high, low = wide(al, bl)
  local _, first = wide(ah, bl)
  local _, second = wide(al, bh)
  return (high + first + second) % WORD, low
end

-- both halves of a 128-bit product, one upon the other
local function fold(ah, al, bh, bl)
  local llh, lll = wide(al, bl)
  local hlh, hll = wide(ah, bl)
  local lhh, lhl = wide(al, bh)
  local hhh, hhl = wide(ah, bh)
  local ch, cl = add(hlh, hll, 0, llh)
  local dh, dl = add(lhh, lhl, 0, cl)
  local uh, ul = add(hhh, hhl, 0, ch)
  uh, ul = add(uh, ul, 0, dh)
  return bxor(uh, dl), bxor(ul, lll)
end

local function shift(ah, al, n) -- to the right, 0 < n < 64
  if n >= 32 then return 0, floor(ah / 2 ^ (n - 32)) end
  local part = 2 ^ n
  return floor(ah / part), floor(al / part) + (ah % part) * 2 ^ (32 - n)
end

local function rotate(ah, al, n) -- to the left, 32 > n > 0 after a swap of halves for more
  if n >= 32 then ah, al, n = al, ah, n - 32 end
  if n == 0 then return ah, al end
  local up, down = 2 ^ n, 2 ^ (32 - n)
  return (ah * up) % WORD + floor(al / down), (al * up) % WORD + floor(ah / down)
end

local function swap32(a)
  return (a % 256) * 16777216 + (floor(a / 256) % 256) * 65536 + (floor(a / 65536) % 256) * 256 + floor(a / 16777216)
end

-- XXH3-64 -----------------------------------------------------------------------------------------------------------------------

local function unhex(text) return (text:gsub("%x%x", function(pair) return string.char(tonumber(pair, 16)) end)) end

local SECRET = unhex(
  "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221" ..
  "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8" ..
  "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb" ..
  "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e")

local function u32(s, at) -- at counts from 0
  local a, b, c, d = s:byte(at + 1, at + 4)
  return a + b * 256 + c * 65536 + d * 16777216
end

local function u64(s, at) return u32(s, at + 4), u32(s, at) end

local P32_1, P32_2, P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
local P64_1 = {0x9E3779B1, 0x85EBCA87}
local P64_2 = {0xC2B2AE3D, 0x27D4EB4F}
local P64_3 = {0x165667B1, 0x9E3779F9}
local P64_4 = {0x85EBCA77, 0xC2B2AE63}
local P64_5 = {0x27D4EB2F, 0x165667C5}
local MX1 = {0x16566791, 0x9E3779F9}
local MX2 = {0x9FB21C65, 0x1E98DF25}

local function avalanche64(h, l)
  h, l = xor(h, l, shift(h, l, 33))
  h, l = mul(h, l, P64_2[1], P64_2[2])
  h, l = xor(h, l, shift(h, l, 29))
  h, l = mul(h, l, P64_3[1], P64_3[2])
  return xor(h, l, shift(h, l, 32))
end

local function avalanche(h, l)
  h, l = xor(h, l, shift(h, l, 37))
  h, l = mul(h, l, MX1[1], MX1[2])
  return xor(h, l, shift(h, l, 32))
end

local function mix16(s, at, key, sh, sl)
  local ah, al = u64(s, at)
  local bh, bl = u64(s, at + 8)
  local kh, kl = u64(SECRET, key)
  local jh, jl = u64(SECRET, key + 8)
  kh, kl = add(kh, kl, sh, sl)
  jh, jl = sub(jh, jl, sh, sl)
  ah, al = xor(ah, al, kh, kl)
  bh, bl = xor(bh, bl, jh, jl)
  return fold(ah, al, bh, bl)
end

local function upto16(s, n, sh, sl)
  if n > 8 then
    local fh, fl = xor(u32(SECRET, 28), u32(SECRET, 24), u64(SECRET, 32))
    local gh, gl = xor(u32(SECRET, 44), u32(SECRET, 40), u64(SECRET, 48))
    fh, fl = add(fh, fl, sh, sl)
    gh, gl = sub(gh, gl, sh, sl)
    local lh, ll = xor(fh, fl, u64(s, 0))
    local hh, hl = xor(gh, gl, u64(s, n - 8))
    local rh, rl = add(swap32(ll), swap32(lh), hh, hl)
    rh, rl = add(rh, rl, 0, n)
    rh, rl = add(rh, rl, fold(lh, ll, hh, hl))
    return avalanche(rh, rl)
  elseif n > 3 then
    sh = bxor(sh, swap32(sl))
    local fh, fl = xor(u32(SECRET, 12), u32(SECRET, 8), u64(SECRET, 16))
    fh, fl = sub(fh, fl, sh, sl)
    local h, l = xor(fh, fl, u32(s, 0), u32(s, n - 4))
    local ah, al = rotate(h, l, 49)
    local bh, bl = rotate(h, l, 24)
    h, l = xor(h, l, bxor(ah, bh), bxor(al, bl))
    h, l = mul(h, l, MX2[1], MX2[2])
    ah, al = shift(h, l, 35)
    ah, al = add(ah, al, 0, n)
    h, l = xor(h, l, ah, al)
    h, l = mul(h, l, MX2[1], MX2[2])
    return xor(h, l, shift(h, l, 28))
  elseif n > 0 then
    local first, middle, last = s:byte(1), s:byte(floor(n / 2) + 1), s:byte(n)
    local fh, fl = add(0, bxor(u32(SECRET, 0), u32(SECRET, 4)), sh, sl)
    return avalanche64(xor(fh, fl, 0, first * 65536 + middle * 16777216 + last + n * 256))
  end
  local fh, fl = xor(u32(SECRET, 60), u32(SECRET, 56), u64(SECRET, 64))
  return avalanche64(xor(fh, fl, sh, sl))
end

local function upto240(s, n, sh, sl)
  local h, l = mul(0, n, P64_1[1], P64_1[2])
  if n <= 128 then
    for i = floor((n - 1) / 32), 0, -1 do
      h, l = add(h, l, mix16(s, 16 * i, 32 * i, sh, sl))
      h, l = add(h, l, mix16(s, n - 16 * i - 16, 32 * i + 16, sh, sl))
    end
    return avalanche(h, l)
  end
  for i = 0, 7 do h, l = add(h, l, mix16(s, 16 * i, 16 * i, sh, sl)) end
  h, l = avalanche(h, l)
  for i = 8, floor(n / 16) - 1 do h, l = add(h, l, mix16(s, 16 * i, 16 * (i - 8) + 3, sh, sl)) end
  h, l = add(h, l, mix16(s, n - 16, 136 - 17, sh, sl))
  return avalanche(h, l)
end

-- The secret under a seed, as pairs of words at every eighth byte; and at the odd places that the end of a long text needs.
local function secret_of(sh, sl)
  local function at(place) -- bytes place .. place + 7
    local low, high = {}, {}
    for i = 0, 7 do
      local byte = place + i
      local base = byte - byte % 16
      local h, l
      if byte % 16 < 8 then h, l = add(u32(SECRET, base + 4), u32(SECRET, base), sh, sl)
      else h, l = sub(u32(SECRET, base + 12), u32(SECRET, base + 8), sh, sl) end
      local word = byte % 8 < 4 and l or h
      local value = floor(word / 256 ^ (byte % 4)) % 256
      if i < 4 then low[#low + 1] = value else high[#high + 1] = value end
    end
    local function word(b) return b[1] + b[2] * 256 + b[3] * 65536 + b[4] * 16777216 end
    return word(high), word(low)
  end
  return at
end

local function beyond240(s, n, sh, sl)
  local key = secret_of(sh, sl)
  local kh, kl = {}, {}
  for i = 0, 23 do kh[i], kl[i] = key(8 * i) end
  local ah = {[0] = 0, P64_1[1], P64_2[1], P64_3[1], P64_4[1], 0, P64_5[1], 0}
  local al = {[0] = P32_3, P64_1[2], P64_2[2], P64_3[2], P64_4[2], P32_2, P64_5[2], P32_1}
  local function stripe(at, hs, ls, first)
    for i = 0, 7 do
      local vh, vl = u64(s, at + 8 * i)
      local other = i % 2 == 0 and i + 1 or i - 1
      ah[other], al[other] = add(ah[other], al[other], vh, vl)
      ah[i], al[i] = add(ah[i], al[i], wide(bxor(vl, ls[first + i]), bxor(vh, hs[first + i])))
    end
  end
  local blocks = floor((n - 1) / 1024)
  for block = 0, blocks - 1 do
    for i = 0, 15 do stripe(1024 * block + 64 * i, kh, kl, i) end
    for i = 0, 7 do
      local h, l = xor(ah[i], al[i], shift(ah[i], al[i], 47))
      h, l = xor(h, l, kh[16 + i], kl[16 + i])
      ah[i], al[i] = mul(h, l, 0, P32_1)
    end
  end
  for i = 0, floor((n - 1 - 1024 * blocks) / 64) - 1 do stripe(1024 * blocks + 64 * i, kh, kl, i) end
  local lasth, lastl = {}, {}
  for i = 0, 7 do lasth[i], lastl[i] = key(192 - 64 - 7 + 8 * i) end
  stripe(n - 64, lasth, lastl, 0)
  local h, l = mul(0, n, P64_1[1], P64_1[2])
  for i = 0, 3 do
    local xh, xl = key(11 + 16 * i)
    local yh, yl = key(11 + 16 * i + 8)
    xh, xl = xor(xh, xl, ah[2 * i], al[2 * i])
    yh, yl = xor(yh, yl, ah[2 * i + 1], al[2 * i + 1])
    h, l = add(h, l, fold(xh, xl, yh, yl))
  end
  return avalanche(h, l)
end

-- (high, low) of a string's XXH3-64 under the seed (sh, sl)
local function xxh3(s, sh, sl)
  local n = #s
  if n <= 16 then return upto16(s, n, sh, sl) end
  if n <= 240 then return upto240(s, n, sh, sl) end
  return beyond240(s, n, sh, sl)
end

-- Fields ------------------------------------------------------------------------------------------------------------------------

local KINDS = {
  "OPEN", "CLOSE", "STEP", "REPLY", "COMPLETION", "COMMIT", "RESET", "CANCEL", "TOKEN", "STATUS", "PROOF", "GRANT", "VOTE", "DECIDE",
  "RELEASED", "EPOCH", "AGREE", "LEAVE", "EXCHANGE",
}
local REASONS = {
  [0] = "none", "bad_magic", "bad_version", "unknown_kind", "unknown_flag", "reserved_bits", "header_digest", "length_bounds",
  "auth_failed", "boot_nonce", "session_mismatch", "slot_bounds", "slot_state", "generation_stale", "generation_duplicate",
  "round_mismatch", "depth_mismatch", "position_bounds", "position_duplicate", "context_mismatch", "representation", "support_bounds",
  "payload_digest", "id_range", "id_order", "id_duplicate", "nonfinite", "negative", "nondyadic", "mass", "zero_entry",
  "zero_q_token", "padding_nonzero", "draw_mismatch", "reply_size", "incomplete", "identity_mismatch", "semantic_mismatch",
  "limits_mismatch", "timeout", "cancelled", "peer_lost", "link_error", "rank_disagree", "key_reuse", "overload", "request_unknown",
  "request_duplicate", "generation_exhausted", "unexpected_kind", "malformed", "invalid_weights", "request_mismatch", "circuit_open",
  "copy_failed",
}
local REPRESENTATIONS = {[0] = "none", "dense", "sparse"}
local SOURCES = {"verified", "target_only"}
local PHASES = {"gathering", "asking", "open"}
local WHATS = {[0] = "frame", "state", "end"}
local DIRECTIONS = {"in", "out"}

local f = {}
local function field(name, kind, title, ...) f[name] = ProtoField[kind]("pp1q." .. name, title, ...) end

field("layout", "uint8", "Layout")
field("what", "uint8", "What", base.DEC, WHATS)
field("direction", "uint8", "Direction", base.DEC, DIRECTIONS)
field("redacted", "bool", "Redacted", 8, nil, 1)
field("cut", "bool", "Cut", 8, nil, 2)
field("more", "bool", "More pieces", 8, nil, 4)
field("offset", "uint32", "Offset in the whole")
field("began_ns", "uint64", "Began, ns earlier")
field("text", "string", "State")
field("piece", "bytes", "Piece")

field("magic", "string", "Magic")
field("version", "uint8", "Version")
field("kind", "uint8", "Kind", base.DEC, KINDS)
field("flags", "uint16", "Flags", base.HEX)
field("boot_nonce", "uint64", "Boot nonce", base.HEX)
field("session", "uint64", "Session", base.HEX)
field("request", "uint64", "Request")
field("slot_generation", "uint32", "Slot generation")
field("request_generation", "uint32", "Request generation")
field("round", "uint32", "Round")
field("position", "uint32", "Position")
field("slot", "uint16", "Slot")
field("shard", "uint16", "Shard")
field("depth", "uint8", "Depth")
field("representation", "uint8", "Representation", base.DEC, REPRESENTATIONS)
field("reserved", "bytes", "Reserved")
field("payload_length", "uint32", "Payload length")
field("entry_count", "uint32", "Entry count")
field("payload_digest", "uint64", "Payload digest", base.HEX)
field("header_digest", "uint64", "Header digest", base.HEX)
field("header_digest_good", "bool", "Header digest good")
field("payload_digest_good", "bool", "Payload digest good")

field("prefix_low", "uint64", "Prefix digest, low", base.HEX)
field("prefix_high", "uint64", "Prefix digest, high", base.HEX)
field("seed", "uint64", "Request seed", base.HEX)
field("token_count", "uint32", "Token count")
field("max_position", "uint32", "Last position")
field("target_context", "uint64", "Target context", base.HEX)
field("trace_id", "uint64", "Trace ID", base.HEX)
field("temperature", "float", "Temperature")
field("support_policy", "uint32", "Support policy")
field("budget_us", "uint32", "Budget, us")
field("token", "int32", "Token")
field("draw_counter", "uint32", "Draw counter")
field("context", "uint64", "Context digest", base.HEX)
field("first_id", "uint32", "First ID")
field("end_id", "uint32", "End ID")
field("shard_mass", "uint32", "Shard mass")
field("mass_before", "uint32", "Mass before")
field("reply_size", "uint64", "Reply size")
field("reply_digest", "uint64", "Reply digest", base.HEX)
field("positions", "uint32", "Positions")
field("status", "uint16", "Status", base.DEC, REASONS)
field("accepted", "uint32", "Accepted")
field("source", "uint32", "Source", base.DEC, SOURCES)
field("subject", "uint32", "Subject")
field("epoch", "uint32", "Epoch")
field("phase", "uint32", "Phase", base.DEC, PHASES)
field("owner", "uint32", "Owner")
field("state_low", "uint64", "State digest, low", base.HEX)
field("state_high", "uint64", "State digest, high", base.HEX)
field("floor", "uint32", "Generation floor")
field("sequence", "uint32", "Exchange of the epoch")
field("purpose", "uint32", "Purpose")

field("payload", "bytes", "Payload")
field("payload_tokens", "int32", "Committed token")
field("q", "float", "q")
field("id", "int32", "ID")
field("hmac", "bytes", "HMAC")
field("winner_value", "double", "Value")
field("winner_token", "int32", "Token of the value")
field("word", "uint64", "Element", base.HEX)
for _, one in pairs(f) do pp1q.fields[#pp1q.fields + 1] = one end

-- (name, offset, bytes) in the order of the bytes; what no line names is reserved.
local HEADER = {
  {"boot_nonce", 8, 8}, {"session", 16, 8}, {"request", 24, 8}, {"slot_generation", 32, 4}, {"request_generation", 36, 4},
  {"round", 40, 4}, {"position", 44, 4}, {"slot", 48, 2}, {"shard", 50, 2}, {"depth", 52, 1}, {"representation", 53, 1},
  {"payload_length", 56, 4}, {"entry_count", 60, 4},
}
local NOTICE = {{"subject", 88, 4}, {"status", 92, 2}}
local BALLOT = {{"epoch", 80, 4}, {"status", 92, 2}}
local ARGUMENTS = {
  OPEN = {{"prefix_low", 64, 8}, {"prefix_high", 72, 8}, {"seed", 80, 8}, {"token_count", 88, 4}, {"max_position", 92, 4}},
  STEP = {
    {"prefix_low", 64, 8}, {"prefix_high", 72, 8}, {"target_context", 80, 8}, {"trace_id", 88, 8}, {"temperature", 96, 4},
    {"support_policy", 100, 4}, {"budget_us", 104, 4},
  },
  REPLY = {
    {"token", 64, 4}, {"draw_counter", 68, 4}, {"context", 72, 8}, {"first_id", 80, 4}, {"end_id", 84, 4}, {"shard_mass", 88, 4},
    {"mass_before", 92, 4},
  },
  COMPLETION = {{"reply_size", 64, 8}, {"context", 72, 8}, {"reply_digest", 80, 8}, {"positions", 88, 4}, {"status", 92, 2}},
  COMMIT = {{"prefix_low", 64, 8}, {"prefix_high", 72, 8}, {"token_count", 80, 4}, {"accepted", 84, 4}, {"source", 88, 4}},
  TOKEN = {{"token", 64, 4}, {"draw_counter", 68, 4}, {"context", 72, 8}},
  CLOSE = NOTICE, RESET = NOTICE, CANCEL = NOTICE, STATUS = NOTICE, PROOF = NOTICE,
  GRANT = {
    {"seed", 64, 8}, {"context", 72, 8}, {"target_context", 80, 8}, {"trace_id", 88, 8}, {"support_policy", 96, 4},
    {"budget_us", 100, 4}, {"epoch", 104, 4}, {"owner", 108, 4},
  },
  VOTE = BALLOT, DECIDE = BALLOT, RELEASED = BALLOT, LEAVE = BALLOT,
  EPOCH = {{"epoch", 80, 4}, {"phase", 88, 4}},
  AGREE = {{"state_low", 64, 8}, {"state_high", 72, 8}, {"epoch", 80, 4}, {"floor", 84, 4}},
  EXCHANGE = {{"sequence", 64, 4}, {"purpose", 68, 4}, {"first_id", 72, 4}, {"end_id", 76, 4}, {"epoch", 80, 4}},
}
-- Which optional common fields a kind may carry (spec.md, "Common fields by kind"); any other one must be zero.
local CARRIES = {
  OPEN = "request position payload", CLOSE = "request", STEP = "request slot round position depth representation",
  REPLY = "request slot round position shard depth representation payload entry_count",
  COMPLETION = "request slot round position shard depth", COMMIT = "request round position payload", RESET = "request slot round",
  CANCEL = "request slot round", TOKEN = "request slot round position shard", STATUS = "request slot round position shard",
  PROOF = "shard payload", GRANT = "request slot round position depth representation", VOTE = "slot payload", DECIDE = "slot payload",
  RELEASED = "slot", EPOCH = "", AGREE = "", LEAVE = "", EXCHANGE = "request round position shard payload entry_count",
}
local GROUPS = {
  request = {{24, 8}, {36, 4}}, slot = {{48, 2}, {32, 4}}, round = {{40, 4}}, position = {{44, 4}}, shard = {{50, 2}},
  depth = {{52, 1}}, representation = {{53, 1}}, payload = {{56, 4}, {112, 8}}, entry_count = {{60, 4}},
}

local experts = {}
local function rule(name, text, group, severity)
  experts[name] = ProtoExpert.new("pp1q.expert." .. name, text, group, severity)
  pp1q.experts[#pp1q.experts + 1] = experts[name]
end
rule("layout", "no packet of a PP1Q capture", expert.group.MALFORMED, expert.severity.ERROR)
rule("magic", "no frame: the magic is wrong", expert.group.MALFORMED, expert.severity.ERROR)
rule("version", "a version that this build does not know", expert.group.PROTOCOL, expert.severity.ERROR)
rule("kind", "a kind that this version does not have", expert.group.PROTOCOL, expert.severity.ERROR)
rule("header_digest", "the header is not what its sender digested", expert.group.CHECKSUM, expert.severity.ERROR)
rule("payload_digest", "the payload is not what its sender digested for this place", expert.group.CHECKSUM, expert.severity.ERROR)
rule("flags", "flags: version 2 has none", expert.group.PROTOCOL, expert.severity.ERROR)
rule("reserved", "reserved bytes that are not zero", expert.group.PROTOCOL, expert.severity.ERROR)
rule("stray", "a field that this kind never carries", expert.group.PROTOCOL, expert.severity.ERROR)
rule("cut", "not the whole frame: the link ended in it, or it can't be told from what follows", expert.group.MALFORMED, expert.severity.WARN)
rule("unchecked", "the payload's digest was not checked", expert.group.CHECKSUM, expert.severity.CHAT)
rule("redacted", "tokens and q were left out", expert.group.COMMENTS_GROUP or expert.group.PROTOCOL, expert.severity.NOTE)
rule("given_up", "a proposal or link was given up", expert.group.RESPONSE_CODE, expert.severity.NOTE)

pp1q.prefs.most = Pref.uint("Check payload digests up to", 65536, "Bytes; a digest takes about 2 us a byte here")

-- Dissection --------------------------------------------------------------------------------------------------------------------

local leaders = {} -- session -> the leader's boot nonce, by which payloads are seeded; both as 16 hexadecimal digits

function pp1q.init() leaders = {} end

local function hex64(tvb, at) return string.format("%08x%08x", tvb(at + 4, 4):le_uint(), tvb(at, 4):le_uint()) end

local function zero(tvb, at, size)
  for i = at, at + size - 1 do
    if tvb(i, 1):uint() ~= 0 then return false end
  end
  return true
end

local function le32(n) return string.char(n % 256, floor(n / 256) % 256, floor(n / 65536) % 256, floor(n / 16777216)) end

-- Whether the payload has the digest that its header states, under the seed of its place; nil when that can't be said.
local function payload_stands(tvb, kind, nonce)
  local raw = tvb:raw(0, tvb:len())
  local seed = string.char(kind) .. le32(tonumber(nonce:sub(9), 16)) .. le32(tonumber(nonce:sub(1, 8), 16)) .. raw:sub(17, 32)
    .. raw:sub(51, 52) .. raw:sub(49, 50) .. raw:sub(33, 48)
  local sh, sl = xxh3(seed, 0, 0)
  local h, l = xxh3(raw:sub(129), sh, sl)
  return h == tvb(116, 4):le_uint() and l == tvb(112, 4):le_uint()
end

local function dissect_payload(tvb, tree, kind, length)
  if length == 0 or tvb:len() < 128 + length then return end
  local name = KINDS[kind]
  local payload = tree:add(f.payload, tvb(128, length))
  if name == "OPEN" or name == "COMMIT" or name == "DECIDE" then
    for at = 128, 124 + length, 4 do payload:add_le(f.payload_tokens, tvb(at, 4)) end
  elseif name == "REPLY" then
    local entries, sparse = tvb(60, 4):le_uint(), tvb(53, 1):uint() == 2
    if length < entries * (sparse and 8 or 4) or entries > 4096 then return end -- a dense row is bytes, not 129,280 lines
    for i = 0, entries - 1 do
      payload:add_le(f.q, tvb(128 + 4 * i, 4))
      if sparse then payload:add_le(f.id, tvb(128 + 4 * (entries + i), 4)) end
    end
  elseif name == "EXCHANGE" then
    local entries = tvb(60, 4):le_uint()
    if length == 12 * entries then
      for at = 128, 116 + length, 12 do
        payload:add_le(f.winner_value, tvb(at, 8))
        payload:add_le(f.winner_token, tvb(at + 8, 4))
      end
    else
      for at = 128, 120 + length, 8 do payload:add_le(f.word, tvb(at, 8)) end
    end
  elseif name == "PROOF" then
    payload:add(f.hmac, tvb(128, length))
  end
end

local function dissect_arguments(tvb, tree, name)
  local at = 64
  for _, one in ipairs(ARGUMENTS[name]) do
    if one[2] > at and not zero(tvb, at, one[2] - at) then
      tree:add_proto_expert_info(experts.reserved, "arguments at " .. at .. " are reserved for " .. name)
    end
    tree:add_le(f[one[1]], tvb(one[2], one[3]))
    at = one[2] + one[3]
  end
  if not zero(tvb, at, 112 - at) then
    tree:add_proto_expert_info(experts.reserved, "arguments from " .. at .. " on are reserved for " .. name)
  end
  for group, places in pairs(GROUPS) do
    if not (" " .. CARRIES[name] .. " "):find(" " .. group .. " ", 1, true) then
      for _, place in ipairs(places) do
        if not zero(tvb, place[1], place[2]) then
          tree:add_proto_expert_info(experts.stray, "a " .. name .. " carries no " .. group)
        end
      end
    end
  end
end

local function judge_payload(tvb, tree, kind, flags)
  local length = tvb(56, 4):le_uint()
  if length == 0 or band(flags, 1) ~= 0 then return end
  local nonce = leaders[hex64(tvb, 16)]
  if tvb:len() < 128 + length then
    if band(flags, 2) == 0 then tree:add_proto_expert_info(experts.unchecked, "the payload's digest was not checked: it comes in pieces") end
  elseif not nonce then
    tree:add_proto_expert_info(experts.unchecked, "the payload's digest was not checked: the leader's nonce is not known")
  elseif length > pp1q.prefs.most then
    tree:add_proto_expert_info(experts.unchecked, "the payload's digest was not checked: it is larger than the preference says")
  else
    local good = payload_stands(tvb, kind, nonce)
    tree:add(f.payload_digest_good, good):set_generated()
    if not good then tree:add_proto_expert_info(experts.payload_digest) end
  end
end

local function info_of(tvb, name)
  local function number(at, size) return tvb(at, size):le_uint() end
  local info = name
  local carries = CARRIES[name]
  if carries:find("request") then info = info .. " request " .. tostring(tvb(24, 8):le_uint64()) end
  if carries:find("slot") and number(32, 4) > 0 then info = info .. " slot " .. number(48, 2) .. "." .. number(32, 4) end
  if carries:find("round") then info = info .. " round " .. number(40, 4) end
  if carries:find("position") then info = info .. " position " .. number(44, 4) end
  for _, one in ipairs(ARGUMENTS[name]) do
    if one[1] == "status" and number(92, 2) > 0 then info = info .. " " .. (REASONS[number(92, 2)] or "unknown reason") end
    if one[1] == "token" then info = info .. " token " .. tvb(64, 4):le_int() end
  end
  return info
end

local function dissect_frame(tvb, pinfo, tree, flags)
  if tvb:len() < 128 then
    pinfo.cols.info = "part of a header, " .. tvb:len() .. " bytes"
    return
  end
  tree:add(f.magic, tvb(0, 4))
  if tvb(0, 4):string() ~= "PP1Q" then
    pinfo.cols.info = "no frame"
    tree:add_proto_expert_info(experts.magic)
    return
  end
  local kind = tvb(5, 1):uint()
  local name = KINDS[kind]
  tree:add(f.version, tvb(4, 1))
  tree:add(f.kind, tvb(5, 1))
  tree:add_le(f.flags, tvb(6, 2))
  for _, one in ipairs(HEADER) do tree:add_le(f[one[1]], tvb(one[2], one[3])) end
  tree:add(f.reserved, tvb(54, 2))
  local h, l = xxh3(tvb:raw(0, 120), 0, 0)
  local good = h == tvb(124, 4):le_uint() and l == tvb(120, 4):le_uint()
  if good and name then dissect_arguments(tvb, tree, name) end
  tree:add_le(f.payload_digest, tvb(112, 8))
  tree:add_le(f.header_digest, tvb(120, 8))
  tree:add(f.header_digest_good, good):set_generated()
  pinfo.cols.info = name and info_of(tvb, name) or ("kind " .. kind)
  if not good then
    tree:add_proto_expert_info(experts.header_digest)
    pinfo.cols.info:append(" [header damaged]")
    return -- nothing that it says can be believed
  end
  if tvb(4, 1):uint() ~= 2 then tree:add_proto_expert_info(experts.version) end
  if not name then tree:add_proto_expert_info(experts.kind) return end
  if tvb(6, 2):le_uint() ~= 0 then tree:add_proto_expert_info(experts.flags) end
  if not zero(tvb, 54, 2) then tree:add_proto_expert_info(experts.reserved, "bytes 54 and 55 are reserved") end
  judge_payload(tvb, tree, kind, flags)
  dissect_payload(tvb, tree, kind, tvb(56, 4):le_uint())
  if (name == "RESET" or name == "CANCEL" or name == "STATUS" or name == "COMPLETION") and tvb(92, 2):le_uint() ~= 0 then
    tree:add_proto_expert_info(experts.given_up, name .. ": " .. (REASONS[tvb(92, 2):le_uint()] or "a reason that is not known"))
  end
end

local function dissect_text(tvb, pinfo, tree, what)
  local text = tvb:raw(0, tvb:len())
  pinfo.cols.info = what == 1 and "the session's state" or "the session's end"
  tree:add(f.text, tvb(), text)
  local session, nonce = text:match('"dissect":{"session":"(%x+)","leader_nonce":"(%x+)"')
  if session then leaders[session] = nonce end
  local reason = text:match('"end":"([%w_]+)"')
  if reason then pinfo.cols.info:append(": " .. reason) end
end

function pp1q.dissector(tvb, pinfo, root)
  pinfo.cols.protocol = "PP1Q"
  local tree = root:add(pp1q, tvb())
  if tvb:len() < 16 or tvb(0, 1):uint() ~= 1 or tvb(1, 1):uint() > 2 then
    tree:add_proto_expert_info(experts.layout)
    return tvb:len()
  end
  local what, flags, offset = tvb(1, 1):uint(), tvb(3, 1):uint(), tvb(4, 4):le_uint()
  tree:add(f.layout, tvb(0, 1))
  tree:add(f.what, tvb(1, 1))
  tree:add(f.direction, tvb(2, 1))
  for _, flag in ipairs({"redacted", "cut", "more"}) do tree:add(f[flag], tvb(3, 1)) end
  tree:add_le(f.offset, tvb(4, 4))
  tree:add_le(f.began_ns, tvb(8, 8))
  if band(flags, 1) ~= 0 then tree:add_proto_expert_info(experts.redacted) end
  if band(flags, 2) ~= 0 then tree:add_proto_expert_info(experts.cut) end
  if tvb:len() == 16 then
    pinfo.cols.info = "nothing left"
  elseif offset > 0 then
    pinfo.cols.info = "what follows, from byte " .. offset
    tree:add(f.piece, tvb(16))
  elseif what == 0 then
    dissect_frame(tvb(16):tvb(), pinfo, tree, flags)
  else
    dissect_text(tvb(16):tvb(), pinfo, tree, what)
  end
  return tvb:len()
end

DissectorTable.get("wtap_encap"):add(wtap.USER0, pp1q)
