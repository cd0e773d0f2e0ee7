/** Colours code line by line: comments, strings, numbers and keywords of common languages. */

const LONGEST = 2000; // characters; a longer line gets no colours

const ENDS = { "/*": "*/", "<!--": "-->", "`": "`", '"""': '"""', "'''": "'''" }; // of what may span lines
const COMMENTS = ["/*", "<!--"]; // those of `ENDS` that are comments; the others are strings

/**
 * Families of languages: their names, what begins a comment to the end of the line, what may span lines, the quotes of
 * strings, and the keywords.
 */
const FAMILIES = [
  {
    names: "python py python3",
    line: "#",
    long: ['"""', "'''"],
    words:
      "False None True and as assert async await break case class continue def del elif else except finally for from " +
      "global if import in is lambda match nonlocal not or pass raise return self try while with yield",
  },
  {
    names: "javascript js jsx mjs typescript ts tsx",
    line: "//",
    long: ["/*", "`"],
    words:
      "as async await break case catch class const continue default delete do else enum export extends false finally for " +
      "from function if implements import in instanceof interface let new null of return static super switch this throw " +
      "true try type typeof undefined var void while yield",
  },
  {
    names: "c h cpp c++ cc hpp cuda java csharp cs c# go golang rust rs kotlin kt swift scala dart php",
    line: "//",
    long: ["/*"],
    quotes: '"', // lifetimes of Rust begin with an apostrophe
    words:
      "#define #if #ifdef #ifndef #else #endif #include abstract as async auto await bool boolean break byte case catch char " +
      "class const constexpr continue crate def default defer delete do double dyn else enum export extends false final " +
      "float fn for foreach fun func function go goto if impl implements import in inline int interface internal let long " +
      "loop match mod move mut namespace new nil null nullptr operator override package private protected pub public range " +
      "readonly ref return self short signed size_t sizeof static string struct super switch template this throw throws " +
      "trait true try type typedef typename u8 union unsafe unsigned use using val var virtual void volatile where while",
  },
  {
    names: "bash sh shell zsh console",
    line: "#",
    words: "case cd do done echo elif else esac exit export fi for function if in local return set sudo then until while",
  },
  {
    names: "ruby rb perl r yaml yml toml ini makefile dockerfile docker elixir",
    line: "#",
    words:
      "ADD ARG CMD COPY ENTRYPOINT ENV EXPOSE FROM RUN USER WORKDIR and begin class def do else elsif end ensure false for " +
      "function if in module my nil no not null or require rescue return self sub then true unless until when while yes",
  },
  { names: "json jsonc json5", line: "//", long: ["/*"], words: "false null true" },
  { names: "css scss less", long: ["/*"], words: "@import @keyframes @media @supports important inherit initial" },
  {
    names: "sql sqlite postgres postgresql mysql",
    line: "--",
    long: ["/*"],
    flags: "i",
    words:
      "alter and as asc between by case create cross default delete desc distinct drop else end exists false foreign from " +
      "full group having in inner insert integer into is join key left like limit not null offset on or order outer primary " +
      "references right select set table text then true union unique update using values varchar view when where with",
  },
  {
    names: "lua haskell hs",
    line: "--",
    words:
      "and break case data deriving do else elseif end false for function if import in instance let local module newtype " +
      "nil not of or repeat return then true type until where while",
  },
  { names: "html xml svg vue", long: ["<!--"], quotes: '"', tags: true },
];

const escape = (text) => text.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&");

/** A regular expression with a named group for each kind of text. None of its parts looks at a text twice. */
function pattern({ line, long = [], quotes = "\"'", words = "", tags = false, flags = "" }) {
  const keyword = tags
    ? "<\\/?[\\w:-]+|\\/?>"
    : `(?<![\\w$.@#-])(?:${words.split(" ").map(escape).join("|")})(?![\\w$-])`;
  const parts = [
    long.length && `(?<long>${long.map(escape).join("|")})`,
    line && `(?<comment>${line === "#" ? "(?<!\\S)" : ""}${escape(line)}.*)`, // a # in a word is no comment
    `(?<string>${[...quotes].map((quote) => `${quote}(?:[^${quote}\\\\]|\\\\.)*${quote}`).join("|")})`,
    `(?<keyword>${keyword})`,
    "(?<number>\\b\\d[\\w.]*)",
  ];
  return new RegExp(parts.filter(Boolean).join("|"), `g${flags}`);
}

const LANGUAGES = new Map(
  FAMILIES.flatMap((family) => {
    const made = pattern(family);
    return family.names.split(" ").map((name) => [name, made]);
  }),
);

/**
 * Split a line of code into parts: `{parts: [{kind, text}], open}`. `kind` is comment, string, keyword, number or null.
 *
 * `language`: its name after the fence; an unknown one has no colours. `open`: what an earlier line has begun and not
 * ended, as this function returned it for that line.
 */
export function split(line, language, open = null) {
  const code = LANGUAGES.get(language.toLowerCase());
  if (!code || line.length > LONGEST) return { parts: [{ kind: null, text: line }], open };
  const parts = [];
  let at = 0;
  const take = (kind, end) => {
    if (end > at) parts.push({ kind, text: line.slice(at, end) });
    at = end;
  };
  const takeLong = (begin, from) => {
    const end = line.indexOf(ENDS[begin], from);
    take(COMMENTS.includes(begin) ? "comment" : "string", end < 0 ? line.length : end + ENDS[begin].length);
    return end < 0 ? begin : null;
  };
  if (open) open = takeLong(open, 0);
  while (at < line.length) {
    code.lastIndex = at;
    const match = code.exec(line);
    take(null, match ? match.index : line.length);
    if (!match) break;
    const [kind, text] = Object.entries(match.groups).find(([, value]) => value !== undefined);
    if (kind === "long") open = takeLong(text, at + text.length);
    else take(kind, at + text.length);
  }
  return { parts, open };
}
